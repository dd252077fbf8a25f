"""Which draft nodes a draft node may attend to: its ancestors and itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treeverify.tree.topology import Tree


def visibility(tree: Tree) -> NDArray[np.bool_]:
    """Return the ancestor-or-self mask bool [width, width]: row = query node, column = key node.

    The prefix is visible to every node and is not part of the mask. A chain gives the lower triangle.
    """
    mask = np.zeros((tree.width, tree.width), dtype=np.bool_)
    mask[0, 0] = True
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        mask[node] = mask[parent]
        mask[node, node] = True
    return mask
