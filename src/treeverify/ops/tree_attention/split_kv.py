"""The algorithm of the CUDA kernel in torch: split-KV flash attention, (node, head) pairs packed as rows.

The KV rows of a request, prefix first and then its draft rows, are cut into splits by prefix rows; the draft rows ride
with the last split, in the same pass. A split walks its rows in tiles and keeps, in fp32, a running maximum, a running
sum and an unnormalised accumulator (``Partial``). Each KV row is fetched once: its first 512 columns are the value. The
tree mask is applied to draft columns only. ``merge`` joins the partials in fp32. For bfloat16 inputs the weights are
rounded to bfloat16 before P.V, as tensor cores take them, and summed as rounded; for float32 everything is float32.

How many splits (``split_rows``): a split has ``fixed_split`` prefix rows if that is given; else a multiple of
``SPLIT_ROWS``, chosen so that there are ``MOST_SPLITS`` at the most. The cut depends on the request's own length only,
so a result never depends on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Unpack

import torch

from treeverify.ops.tree_attention.contract import LATENT, ROW, TORCH_LIMITS, Options, check, rows_of

SPLIT_ROWS = 128
"""A split's prefix rows are a multiple of this unless ``fixed_split`` says otherwise."""
MOST_SPLITS = 8
"""More would only add small operations: a CPU gains nothing by splitting, it does so to run the kernel's algorithm."""
TILE_ROWS = 1024
"""Prefix rows per tile: 2.3 MB of fp32 keys, which stay in the last-level cache between the two products."""


class Partial(NamedTuple):
    """What one split knows: fp32, not yet divided by the sum."""

    acc: torch.Tensor
    """``[nodes*heads, 512]``: sum of weight * value."""
    peak: torch.Tensor
    """``[nodes*heads, 1]``: largest score; ``-inf`` if the split shows nothing to this row."""
    total: torch.Tensor
    """``[nodes*heads, 1]``: sum of weights."""


def tree_attention_split_kv(
    q: torch.Tensor,
    draft_kv: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute tree attention split by split; arguments, results and errors as in ``api.tree_attention``.

    Returns ``out [batch*nodes, heads, 512]`` in q's dtype and ``lse [batch*nodes, heads]`` float32. ``workspace`` is
    checked and not used.
    """
    problem = check(q, draft_kv, kv_pool, kv_indptr, kv_indices, limits=TORCH_LIMITS, **options)
    nodes, scale, fixed_split = problem.nodes, options["scale"], options.get("fixed_split")
    mask, mask_indptr, tree_bits = options.get("mask"), options.get("mask_indptr"), options.get("tree_bits")
    out, lse = options.get("out"), options.get("lse")
    out = q.new_empty(problem.tokens, problem.heads, LATENT) if out is None else out
    lse = q.new_empty(problem.tokens, problem.heads, dtype=torch.float32) if lse is None else lse
    draft_rows, pool_rows = rows_of(draft_kv), rows_of(kv_pool)
    starts: list[int] = kv_indptr.tolist()
    offsets: list[int] = [] if mask_indptr is None else mask_indptr.tolist()
    bits = None if tree_bits is None else _unpack(tree_bits, nodes)
    for request in range(problem.batch):
        tokens = slice(request * nodes, (request + 1) * nodes)
        slots = kv_indices[starts[request] : starts[request + 1]]
        if mask is not None:
            visible = _draft_columns(mask, offsets[request], slots.numel(), nodes)
        else:
            visible = _chain(nodes, q.device) if bits is None else bits[request]
        query = q[tokens].reshape(nodes * problem.heads, ROW).float()
        partials = [
            _split(query, part, pool_rows, tail, visible, scale, q.dtype)
            for part, tail in _cut(slots, draft_rows[tokens], fixed_split or split_rows(slots.numel()))
        ]
        result, log_total = merge(partials)
        out[tokens] = result.view(nodes, problem.heads, LATENT)
        lse[tokens] = log_total.view(nodes, problem.heads)
    return out, lse


def split_rows(prefix: int) -> int:
    """Prefix rows per split of a request with ``prefix`` committed tokens."""
    return SPLIT_ROWS * max(1, -(-prefix // (SPLIT_ROWS * MOST_SPLITS)))


def merge(partials: list[Partial]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the splits of one request in fp32: ``out [rows, 512]`` (0 where nothing is seen), LSE ``[rows, 1]``."""
    peak = partials[0].peak
    for partial in partials[1:]:
        peak = torch.maximum(peak, partial.peak)
    acc, total = _rescaled(partials[0], peak)
    for partial in partials[1:]:
        more_acc, more_total = _rescaled(partial, peak)
        acc, total = acc + more_acc, total + more_total
    return acc / total.masked_fill(total == 0, 1.0), _finite(peak) + total.log()


def _rescaled(partial: Partial, peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factor = (partial.peak - _finite(peak)).exp()
    return partial.acc * factor, partial.total * factor


def _finite(peak: torch.Tensor) -> torch.Tensor:
    """Replace ``-inf`` by 0: ``exp(-inf - 0)`` is the 0 that is wanted, ``exp(-inf + inf)`` would be NaN."""
    return peak.masked_fill(peak == -torch.inf, 0.0)


def _cut(
    slots: torch.Tensor, draft: torch.Tensor | None, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield (slots of a split, draft rows or None); the last split, the only one if P = 0, takes the draft rows."""
    prefix = slots.numel()
    for begin in range(0, max(prefix, 1), rows):
        yield slots[begin : begin + rows], draft if begin + rows >= prefix else None


def _split(
    query: torch.Tensor,
    slots: torch.Tensor,
    pool_rows: torch.Tensor,
    draft: torch.Tensor | None,
    visible: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
) -> Partial:
    """Walk one split tile by tile: query fp32 ``[rows, 576]``; the last tile also takes the draft rows, if any."""
    state: Partial | None = None
    for part, tail in _cut(slots, draft, TILE_ROWS):
        keys = pool_rows.index_select(0, part).float() if tail is None else _with_draft(pool_rows, part, tail, visible)
        scores = (query @ keys.T).mul_(scale)
        if tail is not None:
            heads = scores.shape[0] // visible.shape[0]
            columns = scores.view(visible.shape[0], heads, -1)[:, :, part.numel() :]
            columns.masked_fill_(~visible[:, None, :], -torch.inf)
        state = _accumulate(state, scores, keys, dtype)
    assert state is not None  # _cut yields at least once
    return state


def _with_draft(
    pool_rows: torch.Tensor, slots: torch.Tensor, draft: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Stage fp32 ``[len(slots) + nodes, 576]``; draft rows that no node sees are zeroed, so 0 * NaN cannot arise."""
    prefix = slots.numel()
    keys = torch.empty(prefix + draft.shape[0], ROW, dtype=torch.float32, device=draft.device)
    if pool_rows.dtype == torch.float32:
        torch.index_select(pool_rows, 0, slots, out=keys[:prefix])
    else:
        keys[:prefix] = pool_rows.index_select(0, slots)
    keys[prefix:] = draft
    keys[prefix:].masked_fill_(~visible.any(dim=0)[:, None], 0.0)
    return keys


def _accumulate(state: Partial | None, scores: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> Partial:
    """Add one tile to the running maximum, sum and accumulator; overwrites ``scores [rows, n]``."""
    peak = scores.amax(dim=1, keepdim=True)
    if state is not None:
        peak = torch.maximum(peak, state.peak)
    weights = scores.sub_(_finite(peak)).exp_()
    if dtype == torch.bfloat16:
        weights = weights.bfloat16().float()
    total = weights.sum(dim=1, keepdim=True)  # of the rounded weights: their common error cancels in the division
    acc = weights @ keys[:, :LATENT]
    if state is not None:
        before_acc, before_total = _rescaled(state, peak)
        acc, total = acc + before_acc, total + before_total
    return Partial(acc, peak, total)


def _chain(nodes: int, device: torch.device) -> torch.Tensor:
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril_()


def _draft_columns(mask: torch.Tensor, begin: int, prefix: int, nodes: int) -> torch.Tensor:
    """Bool ``[nodes, nodes]``: the last ``nodes`` cells of each row of the request whose mask starts at ``begin``."""
    row = prefix + nodes
    offset = mask.storage_offset() + begin + prefix
    return mask.as_strided((nodes, nodes), (row, 1), offset).to(torch.bool)


def _unpack(tree_bits: torch.Tensor, nodes: int) -> torch.Tensor:
    """Bool ``[batch, nodes, nodes]`` from int64 or uint64 words; bits at or above ``nodes`` are dropped."""
    shifts = torch.arange(64, device=tree_bits.device)
    bits = (tree_bits.view(torch.int64)[..., None] >> shifts) & 1
    return bits.flatten(-2)[..., :nodes].to(torch.bool)
