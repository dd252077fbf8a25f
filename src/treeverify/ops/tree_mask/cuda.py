"""The compiled ``tree_mask``: passes the buffers to the library; no arithmetic, no allocation, no wait."""

from __future__ import annotations

import torch

from treeverify.ops import compiled
from treeverify.ops.tree_mask.contract import TreeMasks


def tree_mask_cuda(parents: torch.Tensor, prefix_lengths: torch.Tensor, out: TreeMasks) -> None:
    """Launch on torch's current stream; arguments as in ``api.tree_mask``. Raises ``ValueError``, ``BuildError``."""
    run = compiled.function("tree_mask", parents.device)
    run(parents, prefix_lengths, out.bits, out.positions, out.full_mask, out.qlen_mask, out.retrieve)
