"""Talking to a live server that runs the plugin, or to the embedded engine's server: one schema, one client."""
