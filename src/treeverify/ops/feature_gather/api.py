"""``feature_gather``: check the contract, then the reference on a CPU or the kernel on a GPU."""

from __future__ import annotations

import torch

from treeverify.ops.feature_gather.contract import Gathered, check
from treeverify.ops.feature_gather.cuda import feature_gather_cuda
from treeverify.ops.feature_gather.reference import feature_gather_reference


def feature_gather(
    features: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    prefix_lengths: torch.Tensor,
    *,
    out: Gathered | None = None,
) -> Gathered:
    """Pack the accepted nodes' features, slots and positions for the next draft; ``contract`` says what padding holds.

    Args:
        features: ``[batch*width, dim]`` bfloat16, float16 or float32, rows contiguous: the target's features by node.
        path: ``[batch, depth+1]`` int32, lengths: ``[batch]`` int32, as ``tree_accept`` gives them.
        lengths: see ``path``.
        slots: ``[batch, width]`` int32 or int64: the step's reserved slots in node order.
        prefix_lengths: ``[batch]`` int32 or int64: committed tokens before each root, before this step.
        out: outputs, for the batch or more requests; with it a call on a GPU allocates nothing.

    Returns:
        ``out``, or new outputs.

    Raises:
        ContractError: before anything is written, naming operator, tensor, expected and got; values (lengths, nodes)
            are examined on a CPU only. The kernel reads no row outside the request's own.
    """
    checker = check(features, path, lengths, slots, prefix_lengths, out)
    if not checker.on_gpu:
        made = feature_gather_reference(features, path, lengths, slots, prefix_lengths)
        if out is None:
            return made
        for name in ("features", "slots", "positions"):
            getattr(out, name)[: len(slots)] = getattr(made, name)
            getattr(out, name)[len(slots) :] = 0
        return out
    if out is None:
        out = Gathered.empty(len(slots), path.shape[1] - 1, features)
    feature_gather_cuda(features, path, lengths, slots, prefix_lengths, out)
    return out
