"""The definition of ``tree_attention``: plain torch, one request at a time, in float64 or float32.

It shares nothing with the implementations it judges but the contract, and it decides the corner cases: a node that sees
nothing gives 0 and LSE ``-inf``; draft rows that no node sees are left out before any product is formed.
"""

from __future__ import annotations

from typing import Unpack

import torch

from treeverify.errors import ContractError
from treeverify.ops.tree_attention.contract import LATENT, OPERATOR, TORCH_LIMITS, Options, check, rows_of


def tree_attention_reference(
    q: torch.Tensor,
    draft_kv: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``softmax(q K^T * scale) V`` and its LSE (natural log) for every draft node, in ``dtype``.

    Arguments as in ``api.tree_attention``; ``dtype`` is float64 or float32. Any device, any number of heads and nodes.
    Results are new tensors: ``out``, ``lse``, ``workspace`` and ``fixed_split`` are checked and not used.

    Returns:
        ``out [batch*nodes, heads, 512]`` and ``lse [batch*nodes, heads]``, both in ``dtype``, not rounded to q's.

    Raises:
        ContractError: the call breaks the contract.
    """
    if dtype not in (torch.float64, torch.float32):
        raise ContractError.of(OPERATOR, "dtype", "torch.float64 or torch.float32", dtype)
    problem = check(q, draft_kv, kv_pool, kv_indptr, kv_indices, limits=TORCH_LIMITS, **options)
    nodes, scale = problem.nodes, options["scale"]
    out = q.new_zeros(problem.tokens, problem.heads, LATENT, dtype=dtype)
    lse = q.new_zeros(problem.tokens, problem.heads, dtype=dtype)
    draft_rows, pool_rows = rows_of(draft_kv), rows_of(kv_pool)
    starts: list[int] = kv_indptr.tolist()
    for request in range(problem.batch):
        tokens = slice(request * nodes, (request + 1) * nodes)
        slots = kv_indices[starts[request] : starts[request + 1]]
        visible = _draft_visibility(request, slots.numel(), options, q.device)
        seen = visible.any(dim=0)  # [nodes]: a row that nobody sees must not reach P.V, where 0 * NaN = NaN
        keys = torch.cat([pool_rows.index_select(0, slots), draft_rows[tokens][seen]]).to(dtype)
        hidden = torch.cat([visible.new_zeros(nodes, slots.numel()), ~visible[:, seen]], dim=1)
        out[tokens], lse[tokens] = _attend(q[tokens].to(dtype), keys, hidden, scale)
    return out, lse


def _draft_visibility(request: int, prefix: int, options: Options, device: torch.device) -> torch.Tensor:
    """Return bool ``[nodes, nodes]``: may the node of this row see the draft node of this column?"""
    nodes, mask, mask_indptr = options["nodes"], options.get("mask"), options.get("mask_indptr")
    if mask is not None and mask_indptr is not None:
        begin = int(mask_indptr[request])
        cells = mask[begin : begin + nodes * (prefix + nodes)].view(nodes, prefix + nodes)
        return cells[:, prefix:] != 0
    tree_bits = options.get("tree_bits")
    if tree_bits is not None:
        column = torch.arange(nodes, device=device)
        words = tree_bits.view(torch.int64)[request][:, column // 64]  # [nodes, nodes]
        return (words >> (column % 64)) & 1 != 0
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()


def _attend(
    query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request: query ``[nodes, heads, 576]``, keys ``[n, 576]``, hidden bool ``[nodes, n]``."""
    nodes, heads, row = query.shape
    if keys.shape[0] == 0:
        return query.new_zeros(nodes, heads, LATENT), query.new_full((nodes, heads), -torch.inf)
    scores = (query.reshape(nodes * heads, row) @ keys.T).view(nodes, heads, -1) * scale
    scores.masked_fill_(hidden[:, None, :], -torch.inf)
    peak = scores.amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)  # nothing visible: exp(-inf - 0) = 0, not exp(-inf + inf) = NaN
    weights = (scores - peak).exp()
    total = weights.sum(dim=-1, keepdim=True)
    out = (weights.view(nodes * heads, -1) @ keys[:, :LATENT]).view(nodes, heads, LATENT)
    return out / total.masked_fill(total == 0, 1.0), (peak + total.log())[..., 0]
