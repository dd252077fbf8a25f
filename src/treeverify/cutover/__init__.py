"""From one verify mode to another on a live service: stages, journal, gates, report, rollback."""
