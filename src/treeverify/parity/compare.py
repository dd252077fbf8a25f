"""Comparing attention outputs, for reports; the measure lies with the operator, where the engine may import it."""

from __future__ import annotations

from treeverify.ops.tree_attention.difference import HISTOGRAM_BINS, Difference, Worst, compare

__all__ = ["HISTOGRAM_BINS", "Difference", "Worst", "compare"]
