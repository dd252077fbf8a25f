"""``tree_attention``: check the contract, choose one implementation openly, call it."""

from __future__ import annotations

from importlib import import_module
from typing import Unpack

import torch

from treeverify.errors import ContractError
from treeverify.ops.tree_attention.checks import expect_tensor
from treeverify.ops.tree_attention.contract import (
    CUDA_LIMITS,
    LATENT,
    OPERATOR,
    TORCH_LIMITS,
    Options,
    check,
)
from treeverify.ops.tree_attention.reference import tree_attention_reference
from treeverify.ops.tree_attention.split_kv import tree_attention_split_kv

IMPLEMENTATIONS = {
    "cpu": ("split_kv", "reference"),
    "cuda": ("portable", "portable-99k", "naive", "split_kv", "reference"),
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
    implementation: str | None = None,
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every draft node to its request's prefix and to the draft nodes it may see (absorbed MLA).

    Args:
        q: ``[batch*nodes, heads, 576]`` bfloat16 (float32 on a CPU); the nodes of a request are adjacent.
        draft_kv: ``[batch*nodes, 576]`` or ``[batch*nodes, 1, 576]``, dtype of q: KV rows of the draft nodes.
        kv_pool: ``[slots, 576]`` or ``[slots, 1, 576]``, dtype of q: the paged pool; values are columns 0..511.
        kv_indptr: ``[batch+1]`` int32 or int64: request i's prefix is ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``.
        kv_indices: ``[>= kv_indptr[-1]]`` int32 or int64: pool slots of the prefixes; draft nodes are not among them.
        implementation: ``split_kv`` (the default on a CPU), ``reference``, or on a GPU ``portable`` (the default
            there), ``portable-99k`` (the same within 99 KiB of shared memory per block) and ``naive``.
        options: ``nodes``, ``scale`` and optionally ``mask``, ``mask_indptr``, ``tree_bits``, ``out``, ``lse``,
            ``workspace``, ``fixed_split``, ``max_prefix``: see ``Options``, which states shape and dtype of each.

    Returns:
        ``(out, lse)``; the tensors passed in, if they were. A node that sees nothing gives 0 and ``-inf``.

    Raises:
        ContractError: before anything is computed, naming operator, tensor, dimension, expected and got.
    """
    expect_tensor("q", q)
    chosen = choose(q.device, implementation)
    if chosen == "split_kv":
        return tree_attention_split_kv(q, draft_kv, kv_pool, kv_indptr, kv_indices, **options)
    limits = TORCH_LIMITS if chosen == "reference" else CUDA_LIMITS
    problem = check(q, draft_kv, kv_pool, kv_indptr, kv_indices, limits=limits, **options)
    out, lse = options.get("out"), options.get("lse")
    out = q.new_empty(problem.tokens, problem.heads, LATENT) if out is None else out
    lse = q.new_empty(problem.tokens, problem.heads, dtype=torch.float32) if lse is None else lse
    if problem.tokens == 0:
        return out, lse
    if chosen == "reference":
        exact, exact_lse = tree_attention_reference(q, draft_kv, kv_pool, kv_indptr, kv_indices, **options)
        return out.copy_(exact), lse.copy_(exact_lse)
    options["out"], options["lse"] = out, lse
    kernel = import_module(_CUDA_MODULE).tree_attention_cuda
    result: tuple[torch.Tensor, torch.Tensor] = kernel(
        q, draft_kv, kv_pool, kv_indptr, kv_indices, implementation=chosen, **options
    )
    return result
