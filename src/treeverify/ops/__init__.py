"""Operators: one folder each, with contract, reference, implementations and public API."""
