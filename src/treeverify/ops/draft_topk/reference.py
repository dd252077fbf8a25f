"""The definitions of ``draft_topk`` and its two halves: a stable sort and a logsumexp in float64."""

from __future__ import annotations

import torch

from treeverify.ops.draft_topk.contract import (
    MISSING,
    OPERATOR,
    SHARD,
    Ranked,
    check_logits,
    check_shards,
    check_values,
)

_LOW = 0xFFFFFFFF
_SIGN_OFF = 0x7FFFFFFF


def draft_topk_reference(logits: torch.Tensor, k: int) -> Ranked:
    """Rank each row; arguments and result as in ``api.draft_topk``, whatever the device.

    Raises:
        ContractError: the call breaks the contract, or a logit is NaN or +inf.
    """
    check_logits(OPERATOR, logits, k, None)
    check_values(OPERATOR, logits)
    batch, depth, vocab = logits.shape
    out = Ranked.empty(batch, depth, k, logits.device)
    out.log_probs.fill_(-torch.inf)
    out.token_ids.fill_(0)
    values, ids = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    lse = torch.logsumexp(values, dim=-1, keepdim=True)
    kept = min(k, vocab)
    exact = torch.where(lse == -torch.inf, -torch.inf, values[..., :kept] - lse)
    out.log_probs[..., :kept] = exact.float()
    out.token_ids[..., :kept] = ids[..., :kept]
    return out


def draft_topk_shard_reference(logits: torch.Tensor, k: int, *, first_id: int) -> torch.Tensor:
    """Rank a shard's columns; arguments and result as in ``api.draft_topk_shard``, whatever the device.

    Raises:
        ContractError: the call breaks the contract, or a logit is NaN or +inf.
    """
    check_logits(SHARD, logits, k, None, first_id)
    check_values(SHARD, logits)
    values, ids = torch.sort(logits.float() + 0.0, dim=-1, descending=True, stable=True)
    kept = min(k, logits.shape[2])
    bits = values[..., :kept].contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _SIGN_OFF, bits).long()
    packed = logits.new_full((*logits.shape[:2], k + 1), MISSING, dtype=torch.int64)
    packed[..., :kept] = (ordered << 32) | (_LOW - (ids[..., :kept] + first_id))
    peak = values[..., :1].double()
    base = torch.where(peak == -torch.inf, 0.0, peak)
    total = (values.double() - base).exp().sum(dim=-1)
    peak_bits = values[..., 0].contiguous().view(torch.int32).long()
    packed[..., k] = (peak_bits << 32) | (total.float().view(torch.int32).long() & _LOW)
    return packed


def draft_topk_combine_reference(shards: torch.Tensor) -> Ranked:
    """Merge shards' results; arguments and result as in ``api.draft_topk_combine``, whatever the device.

    Raises:
        ContractError: the call breaks the contract.
    """
    check_shards(shards, None)
    count, batch, depth, entries = shards.shape
    k = entries - 1
    keys = shards[..., :k].permute(1, 2, 0, 3).reshape(batch, depth, count * k)
    best = torch.sort(keys, dim=-1, descending=True).values[..., :k]
    ordered = (best >> 32).to(torch.int32)
    values = torch.where(ordered < 0, ordered ^ _SIGN_OFF, ordered).view(torch.float32).double()
    there = best != MISSING
    stats = shards[..., k]
    peaks = (stats >> 32).to(torch.int32).view(torch.float32).double()
    sums = (stats << 32 >> 32).to(torch.int32).view(torch.float32).double()
    lse = torch.logsumexp(peaks + sums.log(), dim=0)[..., None]
    log_probs = torch.where(there & (lse != -torch.inf), values - lse, -torch.inf)
    return Ranked(log_probs.float(), torch.where(there, _LOW - (best & _LOW), 0))
