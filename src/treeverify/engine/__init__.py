"""Requests, scheduler, one draft-verify-accept-commit step, verify modes."""
