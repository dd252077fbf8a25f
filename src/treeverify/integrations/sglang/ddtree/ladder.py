"""The widths that ``KDTREE_BUDGET=auto`` may verify. The draft is of the widest; a narrower tree is its front."""

from __future__ import annotations

from treeverify.env import budget_by_cost, width_ladder
from treeverify.errors import ConfigError

_BETWEEN = (5, 9, 17, 33, 65, 129)
_APART = 1.5
"""Least ratio of a default width to the block and to the top: each width is a set of CUDA graphs."""


def ladder_of(block: int, top: int) -> tuple[int, ...] | None:
    """Return the rising widths from 1 (no speculation) to ``top``, None where the width is fixed.

    Without ``KDTREE_LADDER``: 1, the drafter's ``block``, ``top``, and what of 5, 9, 17, 33, 65, 129 is not close to
    those two. Raises ``ConfigError`` for a ladder that does not end with ``top``, or has no width above 1.
    """
    given = width_ladder()
    if not budget_by_cost():
        return None
    if given is not None:
        if given[-1] != top or len(given) < 2:
            listed = ",".join(map(str, given))
            raise ConfigError(
                f"KDTREE_LADDER: expected its last width to be --speculative-num-draft-tokens, {top}; got {listed}"
            )
        return given
    between = {
        width
        for width in _BETWEEN
        if width < top and all(max(width, fixed) >= _APART * min(width, fixed) for fixed in (block, top))
    }
    return tuple(sorted({1, block, top} | between))
