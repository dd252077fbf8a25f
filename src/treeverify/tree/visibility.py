"""Which draft nodes a draft node may attend to: its ancestors and itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treeverify.tree.topology import Tree


def visibility(tree: Tree) -> NDArray[np.bool_]:
    """Return the ancestor-or-self mask bool [width, width]: row = query node, column = key node.

    The prefix is visible to every node and is not part of the mask. A chain gives the lower triangle.
    """
    return ancestors(tree.parents.tolist())


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Return that mask from the parents alone, each smaller than its node; -1 for who has none, as padding."""
    mask = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask
