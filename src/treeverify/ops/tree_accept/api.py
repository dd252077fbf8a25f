"""``tree_accept`` and ``tree_accept_sampled``: check, then the pure core on a CPU or the kernel on a GPU."""

from __future__ import annotations

import torch

from treeverify.ops.tree_accept.contract import Accepted, LawTensors, check, check_sampled, workspace_elements
from treeverify.ops.tree_accept.cpu import tree_accept_cpu, tree_accept_sampled_cpu
from treeverify.ops.tree_accept.cuda import tree_accept_cuda, tree_accept_sampled_cuda


def tree_accept(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    samples: torch.Tensor,
    *,
    depth: int,
    out: Accepted | None = None,
) -> Accepted:
    """Accept the longest path that the samples agree with, for each request; bit-equal to ``tree.accept``.

    Args:
        tokens: ``[batch, width]`` int64, parents: ``[batch, width]`` int32, as ``tree_build`` gives them; width 1..257.
        parents: see ``tokens``.
        samples: ``[batch, width]`` int64, >= 0: the target's token after each node; at temperature 0 its argmax.
        depth: of the deepest node that may be accepted, 0..256; paths have depth + 1 columns.
        out: outputs of exactly these sizes; with it a call on a GPU allocates nothing.

    Returns:
        ``out``, or new outputs.

    Raises:
        ContractError: before anything is written, naming operator, tensor, expected and got; values (negative samples)
            are examined on a CPU only.
    """
    checker = check(tokens, parents, samples, depth, out)
    if out is None:
        out = Accepted.empty(tokens.shape[0], tokens.shape[1], depth, tokens.device)
    if checker.on_gpu:
        tree_accept_cuda(tokens, parents, samples, out)
    else:
        tree_accept_cpu(tokens, parents, samples, out)
    return out


def tree_accept_sampled(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    logits: torch.Tensor,
    law: LawTensors,
    uniforms: torch.Tensor,
    *,
    out: Accepted | None = None,
    workspace: torch.Tensor | None = None,
) -> Accepted:
    """Draw from the target's law at each node that the walk visits, and accept as ``tree_accept`` does.

    Args:
        tokens: ``[batch, width]`` int64, parents: ``[batch, width]`` int32, as ``tree_build`` gives them; width 1..257.
        parents: see ``tokens``.
        logits: ``[batch*width, vocab]`` float32 or bfloat16 of the whole vocabulary (up to 2^20), rows contiguous.
        law: temperature, top-k, top-p and min-p per request; greedy and sampling requests may be mixed.
        uniforms: ``[batch, depth+1]`` float64 in [0, 1): column d is for nodes of depth d
            (``step.randomness.uniforms``).
        out: outputs of exactly these sizes.
        workspace: int64, ``contract.workspace_elements(batch)`` of them, any bytes; unused on a CPU. With ``out`` and
            ``workspace`` a call on a GPU allocates nothing.

    Returns:
        ``out``, or new outputs. The law, and how exact it is: ``contract``.

    Raises:
        ContractError: before anything is written, naming operator, tensor, expected and got; values (ranges, NaN in a
            visited row) are examined on a CPU only.
    """
    checker = check_sampled(tokens, parents, logits, law, uniforms, out, workspace)
    if out is None:
        out = Accepted.empty(tokens.shape[0], tokens.shape[1], uniforms.shape[1] - 1, tokens.device)
    if not checker.on_gpu:
        tree_accept_sampled_cpu(tokens, parents, logits, law, uniforms, out)
        return out
    if workspace is None:
        workspace = torch.empty(workspace_elements(tokens.shape[0]), dtype=torch.int64, device=tokens.device)
    tree_accept_sampled_cuda(tokens, parents, logits, law, uniforms, workspace, out)
    return out
