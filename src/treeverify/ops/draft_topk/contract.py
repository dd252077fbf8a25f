"""The contract of ``draft_topk``, ``draft_topk_shard`` and ``draft_topk_combine``: the rule of ``tree.top_candidates``.

Per depth: the k largest logits by falling logit, equal logits by rising token id (-0.0 equals 0.0), and for each the
logit minus the logsumexp of the *whole* vocabulary. A logit of -inf gets log-probability -inf; a row of nothing else
gets -inf throughout. With k above the vocabulary the columns beyond it hold token 0 and -inf, which ``tree_build``
never drafts. A row with NaN or +inf gets NaN log-probabilities throughout, which ``tree_build`` does not draft either;
a call on a CPU refuses it by position instead.

Under tensor parallelism each rank calls ``draft_topk_shard`` on its own columns, ranks gather the results (one
collective), and each calls ``draft_topk_combine``. Ids are those of a single shard bit for bit, on every rank the same;
log-probabilities are the same on every rank, and within ``log_prob_error`` of the exact ones like a single shard's.

A shard's result is int64 ``[batch, depth, k + 1]``. Entry j < k is the j-th best candidate: the float32 logit in the
high 32 bits, as the integer that compares alike (bits, and for negative values the lower 31 inverted), and the bitwise
complement of the token id in the low 32: so the larger integer is the better candidate. ``MISSING`` fills the places
that a small shard has no token for. Entry k is the bit pattern of the shard's largest logit (high) and of the sum of
exp(logit - that), both float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeverify.errors import ContractError
from treeverify.ops.checks import Checker

OPERATOR, SHARD, COMBINE = "draft_topk", "draft_topk_shard", "draft_topk_combine"
MAX_K = 256
MAX_VOCAB = 1 << 23
"""Of all shards together; an id must fit in 32 bits, and the error bound counts on it."""
TILE = 8192
"""Columns that one block of the kernel ranks; larger rows are ranked in parts and merged."""
MISSING = -(1 << 63)
LOGIT_DTYPES = (torch.float32, torch.bfloat16)
_SUM_ERROR = 6e-6
_ROUNDING = 2.0**-23


def log_prob_error(exact: torch.Tensor, logit: torch.Tensor) -> torch.Tensor:
    """Bound on abs(log_prob - exact) of an implementation in float32; ``exact`` float64, ``logit`` of that token.

    A term of the sum errs relatively by 2^-23 (expf, 1 ulp) + 2^-24 * (peak - logit). The law's mean of peak - logit is
    its entropy minus ln(sum), so at most ln(2^23) = 16: 2^-24 * 18 = 1.1e-6 for the whole sum. A thread adds 16 terms
    to each of two sums and these to each other, then come 5 levels of a warp, 8 warps, up to 32 parts per lane and 5
    levels, each with half an ulp: 67 * 2^-24 = 4.0e-6. A part is scaled by one more expf: 2^-23 and half an ulp,
    0.2e-6. Together below 6e-6, an absolute error of the logarithm. Then log, peak + log and logit - lse are rounded
    once each: 2^-23 of their sizes.
    """
    lse = (logit.double() - exact).abs()
    return _SUM_ERROR + _ROUNDING * (2 * lse + exact.abs())


@dataclass(frozen=True, eq=False)
class Ranked:
    """The ranked candidates of a batch, as ``tree_build`` takes them."""

    log_probs: torch.Tensor
    """``[batch, depth, k]`` float32, not rising along k."""
    token_ids: torch.Tensor
    """``[batch, depth, k]`` int64, global ids."""

    @classmethod
    def empty(cls, batch: int, depth: int, k: int, device: torch.device | str) -> Ranked:
        """Unwritten outputs."""
        return cls(
            torch.empty(batch, depth, k, dtype=torch.float32, device=device),
            torch.empty(batch, depth, k, dtype=torch.int64, device=device),
        )


def workspace_elements(batch: int, depth: int, vocab: int, k: int) -> int:
    """Int64 elements of workspace that a call on a GPU needs for rows of ``vocab`` columns (one shard's)."""
    return -(-vocab // TILE) * batch * depth * (k + 1)


def check_logits(
    operator: str, logits: torch.Tensor, k: int, workspace: torch.Tensor | None, first_id: int = 0
) -> Checker:
    """Check the common part of ``draft_topk`` and ``draft_topk_shard``; raises ``ContractError``. Reads no value."""
    checker = Checker.of(operator, "logits", logits)
    checker.integer("k", k, 1, MAX_K)
    checker.rows("logits", logits, LOGIT_DTYPES, (None, None, None))
    batch, depth, vocab = logits.shape
    checker.integer("logits: dimension 2 (vocab)", vocab, 1, MAX_VOCAB)
    checker.integer("first_id", first_id, 0, MAX_VOCAB - vocab)
    if workspace is not None:
        checker.tensor("workspace", workspace, (torch.int64,), (None,))
        least = workspace_elements(batch, depth, vocab, k)
        if checker.on_gpu and workspace.shape[0] < least:
            raise checker.refuse("workspace: dimension 0", f">= {least}", workspace.shape[0])
    return checker


def check_ranked(checker: Checker, batch: int, depth: int, k: int, out: Ranked | None) -> None:
    """Check the outputs of ``draft_topk`` and ``draft_topk_combine``; raises ``ContractError``."""
    if out is not None:
        checker.tensor("out.log_probs", out.log_probs, (torch.float32,), (batch, depth, k))
        checker.tensor("out.token_ids", out.token_ids, (torch.int64,), (batch, depth, k))


def check_shards(shards: torch.Tensor, out: Ranked | None) -> Checker:
    """Check a call of ``draft_topk_combine``; raises ``ContractError``. Reads no value."""
    checker = Checker.of(COMBINE, "shards", shards)
    checker.tensor("shards", shards, (torch.int64,), (None, None, None, None))
    count, batch, depth, entries = shards.shape
    checker.integer("shards: dimension 0 (shards)", count, 1, 1024)
    checker.integer("shards: dimension 3 (k + 1)", entries, 2, MAX_K + 1)
    check_ranked(checker, batch, depth, entries - 1, out)
    return checker


def check_values(operator: str, logits: torch.Tensor) -> None:
    """Check the values of a call on a CPU; raises ``ContractError`` for a NaN or +inf logit."""
    bad = ~(logits < torch.inf)
    if bool(bad.any()):
        request, depth, token = bad.nonzero()[0].tolist()
        got = f"{float(logits[request, depth, token])} at request {request}, depth {depth}, column {token}"
        raise ContractError.of(operator, "logits", "finite or -inf", got)
