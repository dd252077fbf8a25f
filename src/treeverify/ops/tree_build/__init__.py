"""Best-first draft trees for a batch in one launch."""
