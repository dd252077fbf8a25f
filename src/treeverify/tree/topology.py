"""The shape of a draft tree: tokens, parents, depths. Everything else in this package is derived from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import ContractError
from treeverify.tree._arrays import frozen, require_array


@dataclass(frozen=True, eq=False, slots=True)
class Tree:
    """A draft tree of ``width`` nodes; node 0 is the root, the bonus token of the step before.

    ``tokens`` int64 [width], all >= 0. ``parents`` int32 [width]: ``parents[0] == -1`` and
    ``0 <= parents[i] < i`` for every other node, so parents come before children. ``depths`` int32 [width] is derived
    (root 0). The three arrays are read-only copies; inputs may have any strides.

    Siblings may carry the same token (candidates from several sources may repeat one): such a tree is legal and
    lossless, because acceptance always follows the lowest-numbered matching child; the others are only wasted width.

    Raises ContractError for another dtype, rank or length, an empty tree, a negative token or a parent out of order.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        """Check the rules and derive the depths."""
        tokens = frozen(require_array("Tree", "tokens", self.tokens, (np.int64,), ndim=1))
        parents = frozen(require_array("Tree", "parents", self.parents, (np.int32,), ndim=1))
        if len(tokens) == 0:
            raise ContractError.of("Tree", "tokens: width", ">= 1 (the root)", 0)
        if len(parents) != len(tokens):
            raise ContractError.of("Tree", "parents: width", f"{len(tokens)} (as tokens)", len(parents))
        token_list = tokens.tolist()
        if min(token_list) < 0:
            node = next(i for i, token in enumerate(token_list) if token < 0)
            raise ContractError.of("Tree", f"tokens[{node}]", ">= 0", tokens[node])
        depths = np.array(_depths(parents.tolist()), dtype=np.int32)
        depths.setflags(write=False)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "depths", depths)

    @property
    def width(self) -> int:
        """Number of nodes, the root included."""
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; an accepted path has at most ``max_depth + 1`` nodes."""
        return int(self.depths.max())


def _depths(parents: list[int]) -> list[int]:
    if parents[0] != -1:
        raise ContractError.of("Tree", "parents[0]", "-1 (node 0 is the root)", parents[0])
    depths = [0]
    for node in range(1, len(parents)):
        parent = parents[node]
        if not 0 <= parent < node:
            raise ContractError.of("Tree", f"parents[{node}]", f"0..{node - 1} (parents before children)", parent)
        depths.append(depths[parent] + 1)
    return depths
