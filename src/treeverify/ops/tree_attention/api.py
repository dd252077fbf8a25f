"""``tree_attention``: check the contract, choose one implementation openly, call it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from treeverify.errors import ContractError
from treeverify.ops.tree_attention.checks import expect_tensor
from treeverify.ops.tree_attention.contract import (
    CUDA_LIMITS,
    LATENT,
    OPERATOR,
    TORCH_LIMITS,
    check,
)
from treeverify.ops.tree_attention.reference import tree_attention_reference
from treeverify.ops.tree_attention.split_kv import tree_attention_split_kv

IMPLEMENTATIONS = {
    "cpu": ("split_kv", "reference"),
    "cuda": ("portable", "naive", "split_kv", "reference"),
}
"""What may be named for each device type; the first is what ``implementation=None`` means there."""
_CUDA_MODULE = "treeverify.ops.tree_attention.cuda"
"""Imported on the first call that needs it, so that a machine without a compiler can import this module."""


def choose(device: torch.device, implementation: str | None) -> str:
    """Name the implementation that a call on ``device`` uses; no fallback.

    Raises ``ContractError`` with the candidates if the device has none or ``implementation`` is not one of them.
    """
    candidates = IMPLEMENTATIONS.get(device.type)
    if candidates is None:
        raise ContractError.of(OPERATOR, "q: device", " or ".join(IMPLEMENTATIONS), device)
    if implementation is None:
        return candidates[0]
    if implementation not in candidates:
        listed = ", ".join(candidates)
        raise ContractError.of(OPERATOR, "implementation", f"one of {listed} on {device.type}", repr(implementation))
    return implementation


def tree_attention(
    q: torch.Tensor,
    draft_kv: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    nodes: int,
    scale: float,
    mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    tree_bits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    implementation: str | None = None,
    fixed_split: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every draft node to its request's prefix and to the draft nodes it may see (absorbed MLA).

    Args:
        q: ``[batch*nodes, heads, 576]`` bfloat16 (float32 on a CPU); the nodes of a request are adjacent.
        draft_kv: ``[batch*nodes, 576]`` or ``[batch*nodes, 1, 576]``, dtype of q: KV rows of the draft nodes.
        kv_pool: ``[slots, 576]`` or ``[slots, 1, 576]``, dtype of q: the paged pool; values are columns 0..511.
        kv_indptr: ``[batch+1]`` int32 or int64: request i's prefix is ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``.
        kv_indices: ``[>= kv_indptr[-1]]`` int32 or int64: pool slots of the prefixes; draft nodes are not among them.
        nodes: draft nodes per request, root included: 1..260 on a GPU.
        scale: factor on the scores before the softmax, finite and > 0.
        mask: flat bool or uint8; request i has ``nodes`` rows of ``P_i + nodes`` cells at ``mask_indptr[i]``, of which
            only the last ``nodes`` are ever read.
        mask_indptr: ``[batch+1]`` int32 or int64, with ``mask`` only.
        tree_bits: ``[batch, nodes, ceil(nodes/64)]`` int64 or uint64: bit j of word i is draft column 64*i + j.
            At most one of ``mask`` and ``tree_bits``; neither means a causal chain in node order.
        out: ``[batch*nodes, heads, 512]``, dtype of q: written in place if given.
        lse: ``[batch*nodes, heads]`` float32, natural log: written in place if given.
        workspace: uint8, for the CUDA kernels only (``cuda.workspace_bytes`` states the size); unused on a CPU.
        implementation: ``split_kv`` (the default on a CPU), ``reference``, or on a GPU ``portable`` (the default there)
            and ``naive``.
        fixed_split: prefix rows per split. With it a request's result does not depend, bit for bit, on its batch.
            Without it the implementation chooses.

    Returns:
        ``(out, lse)``; the tensors passed in, if they were. A node that sees nothing gives 0 and ``-inf``.

    Raises:
        ContractError: before anything is computed, naming operator, tensor, dimension, expected and got.
    """
    expect_tensor("q", q)
    chosen = choose(q.device, implementation)
    call: dict[str, Any] = {
        "nodes": nodes,
        "scale": scale,
        "mask": mask,
        "mask_indptr": mask_indptr,
        "tree_bits": tree_bits,
    }
    buffers: dict[str, Any] = {"out": out, "lse": lse, "workspace": workspace, "fixed_split": fixed_split}
    if chosen == "split_kv":
        return tree_attention_split_kv(q, draft_kv, kv_pool, kv_indptr, kv_indices, **call, **buffers)
    limits = TORCH_LIMITS if chosen == "reference" else CUDA_LIMITS
    problem = check(q, draft_kv, kv_pool, kv_indptr, kv_indices, **call, **buffers, limits=limits)
    out = q.new_empty(problem.tokens, problem.heads, LATENT) if out is None else out
    lse = q.new_empty(problem.tokens, problem.heads, dtype=torch.float32) if lse is None else lse
    if problem.tokens == 0:
        return out, lse
    if chosen == "reference":
        exact, exact_lse = tree_attention_reference(q, draft_kv, kv_pool, kv_indptr, kv_indices, **call)
        return out.copy_(exact), lse.copy_(exact_lse)
    kernel = import_module(_CUDA_MODULE).tree_attention_cuda
    buffers |= {"out": out, "lse": lse, "implementation": chosen}
    result: tuple[torch.Tensor, torch.Tensor] = kernel(q, draft_kv, kv_pool, kv_indptr, kv_indices, **call, **buffers)
    return result
