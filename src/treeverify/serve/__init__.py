"""The embedded engine behind HTTP, with the calls of an SGLang server that runs the plugin."""
