"""Acceptance: walk the tree for as long as the target's own sample is a drafted child (arXiv 2604.12989)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import ContractError
from treeverify.tree._arrays import require_array
from treeverify.tree.topology import Tree


@dataclass(frozen=True, eq=False, slots=True)
class Acceptance:
    """One step's outcome.

    ``path`` int32 [length]: accepted nodes, strictly rising, beginning with the root 0; its length is the acceptance
    length and is at most ``tree.max_depth + 1``. ``bonus``: the target's sample at the path's last node, which is the
    next step's root.
    """

    path: NDArray[np.int32]
    bonus: int

    @property
    def length(self) -> int:
        """The acceptance length, the root included; also the number of new tokens, the bonus included."""
        return len(self.path)

    def new_tokens(self, tree: Tree) -> NDArray[np.int64]:
        """The step's new tokens int64 [length]: those of the path after the root, then the bonus."""
        return np.append(tree.tokens[self.path[1:]], np.int64(self.bonus))


def accept(tree: Tree, samples: NDArray[np.int64]) -> Acceptance:
    """Walk from the root while the sample at the current node is the token of one of its children.

    ``samples`` int64 [width]: one draw from the target's law at each node (the argmax at temperature 0). The draft's
    probabilities play no part, so the output has the target's law for any tree. Among siblings with the same token the
    lowest-numbered one is followed. The first miss is the bonus; a leaf always misses.

    Raises ContractError for another dtype, a length other than the tree's width, or a negative sample.
    """
    samples = require_array("accept", "samples", samples, (np.int64,), ndim=1)
    if len(samples) != tree.width:
        raise ContractError.of("accept", "samples: width", f"{tree.width} (as the tree)", len(samples))
    if samples.min() < 0:
        node = int(np.flatnonzero(samples < 0)[0])
        raise ContractError.of("accept", f"samples[{node}]", ">= 0", samples[node])
    draws = samples.tolist()
    path, new = walk(tree.tokens.tolist(), tree.parents.tolist(), lambda node, _: draws[node], tree.width)
    return Acceptance(np.array(path, dtype=np.int32), new[-1])


def walk(
    tokens: Sequence[int], parents: Sequence[int], draw: Callable[[int, int], int], depth: int
) -> tuple[list[int], list[int]]:
    """The walk itself: the path's nodes, and what was drawn at each of them; the last draw is the bonus.

    ``draw(node, depth of the node)`` is asked at the path's nodes alone. A node whose parent is no earlier node, as the
    padding of a batch, is never met. The path ends at ``depth``, whatever is drawn there.
    """
    path, new = [0], [draw(0, 0)]
    # Parents come before children, so one pass over the nodes meets the whole path in order.
    for node in range(1, len(tokens)):
        if len(path) > depth:
            break
        if parents[node] == path[-1] and tokens[node] == new[-1]:
            path.append(node)
            new.append(draw(node, len(path) - 1))
    return path, new
