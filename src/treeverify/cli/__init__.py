"""The treeverify command."""
