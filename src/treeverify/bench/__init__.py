"""Timing, acceptance tables, rooflines and the records they leave."""
