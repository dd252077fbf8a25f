"""Serving stacks that run this project's kernels; the layer above everything but the command line."""
