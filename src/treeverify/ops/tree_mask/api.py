"""``tree_mask``: check the contract, then the pure core on a CPU or the kernel on a GPU."""

from __future__ import annotations

import torch

from treeverify.ops.tree_mask.contract import TreeMasks, check
from treeverify.ops.tree_mask.cpu import tree_mask_cpu
from treeverify.ops.tree_mask.cuda import tree_mask_cuda


def tree_mask(parents: torch.Tensor, prefix_lengths: torch.Tensor, *, out: TreeMasks | None = None) -> TreeMasks:
    """Write masks, positions and links of a batch of draft trees; ``contract`` describes the layouts.

    Args:
        parents: ``[batch, width]`` int32, as ``tree_build`` gives it; width 1..257.
        prefix_lengths: ``[batch]`` int32 or int64: committed tokens before each root (SGLang's ``seq_lens``).
        out: which outputs to write, and where; with it a call on a GPU allocates nothing. None: ``bits`` and
            ``positions``, new.

    Returns:
        ``out``, or the new outputs.

    Raises:
        ContractError: before anything is written, naming operator, tensor, expected and got. On a GPU the size of
            ``full_mask`` is the caller's to know; on a CPU it is checked.
    """
    if out is None:
        checker = check(parents, prefix_lengths, TreeMasks())
        out = TreeMasks.empty(parents.shape[0], parents.shape[1], parents.device)
    else:
        checker = check(parents, prefix_lengths, out)
    if checker.on_gpu:
        tree_mask_cuda(parents, prefix_lengths, out)
    else:
        tree_mask_cpu(parents, prefix_lengths, out)
    return out
