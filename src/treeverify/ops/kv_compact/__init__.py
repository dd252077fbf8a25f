"""Accepted KV rows of all layers to the front of their request's slots, in one launch."""
