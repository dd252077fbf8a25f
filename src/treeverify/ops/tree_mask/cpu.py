"""``tree_mask`` on a CPU: the pure core's visibility and packing."""

from __future__ import annotations

import numpy as np
import torch

from treeverify.ops.tree_mask.contract import TreeMasks
from treeverify.ops.tree_mask.reference import tree_mask_reference
from treeverify.tree.packing import pack_rows
from treeverify.tree.visibility import ancestors


def tree_mask_cpu(parents: torch.Tensor, prefix_lengths: torch.Tensor, out: TreeMasks) -> None:
    """Fill the outputs that ``out`` holds; the call is checked."""
    width = parents.shape[1]
    up = [[p if 0 <= p < node else -1 for node, p in enumerate(row)] for row in parents.tolist()]
    visible = np.stack([ancestors(row) for row in up])
    if out.bits is not None:
        out.bits.view(torch.int64).numpy()[:] = pack_rows(visible).view(np.int64)
    if out.positions is not None:
        depths = torch.from_numpy(visible.sum(-1) - 1)
        out.positions.view_as(depths).copy_(prefix_lengths.unsqueeze(1) + depths)
    if out.qlen_mask is not None:
        out.qlen_mask[: visible.size] = torch.from_numpy(visible.reshape(-1))
    if out.full_mask is not None:
        begin = 0
        for prefix, seen in zip(prefix_lengths.tolist(), visible, strict=True):
            end = begin + width * (prefix + width)
            out.full_mask[begin:end].view(width, prefix + width)[:, prefix:] = torch.from_numpy(seen)
            begin = end
    if out.retrieve is not None:  # links, of which the core knows nothing
        tree_mask_reference(parents, prefix_lengths, TreeMasks(retrieve=out.retrieve))
