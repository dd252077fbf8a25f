"""Requests, scheduling and the draft-verify-accept-commit step."""
