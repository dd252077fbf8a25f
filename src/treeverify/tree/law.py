"""The law a token is drawn from: temperature, top-k, top-p and min-p applied to the target's logits, and the draw.

Per row, in this order (SGLang's sequence in tree verification, which has no min-p, and in its sampler with min-p; its
sampler without min-p judges top-k and top-p jointly, on the law before either):

1. weights ``exp((logit - max) / temperature)``; below temperature 1e-5 all weight is on the argmax, whatever follows;
2. top-k: the first ``top_k`` tokens;
3. top-p, judged on the law renormalised after top-k: the shortest run of first tokens whose mass is >= ``top_p``;
4. min-p: tokens whose weight is at least ``min_p`` times the largest weight;
5. renormalise.

"First" is by falling logit, equal logits by rising token id, so each filter keeps a run of the same order and every
tie, at a boundary or at the argmax, goes to the smaller id. All arithmetic is float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import ConfigError, ContractError
from treeverify.tree._arrays import require_array, require_int

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy (arXiv 2604.12989 and its code use the same bound)."""

_FIRST_LOOK = 256  # tokens of a row that are sorted before looking further; a nucleus is rarely wider

_FLOATS = (np.float16, np.float32, np.float64)


@dataclass(frozen=True, slots=True)
class LawParams:
    """How one request samples; immutable and validated.

    ``temperature`` >= 0 and finite (below 1e-5: greedy); ``top_k`` >= 1, None = off; ``top_p`` in (0, 1], 1 = off;
    ``min_p`` in [0, 1], 0 = off. Raises ConfigError that names the parameter; NaN is never in range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
                raise ConfigError(f"{name}: expected a number, got {value!r}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature: expected a finite number >= 0, got {self.temperature!r}")
        if self.top_k is not None and not _is_top_k(self.top_k):
            raise ConfigError(f"top_k: expected an integer >= 1, or None for off, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected a number in (0, 1], got {self.top_p!r}")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p: expected a number in [0, 1], got {self.min_p!r}")

    @property
    def greedy(self) -> bool:
        """True if the law is one-hot at the argmax."""
        return self.temperature < GREEDY_BELOW


def target_law(logits: NDArray[Any], params: LawParams) -> NDArray[np.float64]:
    """Return the law float64 [..., vocab] of each row of ``logits`` [..., vocab] (float16, float32 or float64).

    A logit of -inf has probability 0. Raises ContractError that names row and token for a NaN or +inf logit, names the
    row if all its logits are -inf, and for another dtype, a scalar or an empty vocabulary.
    """
    return _law(_checked_rows("target_law", logits), params).reshape(logits.shape)


def sample(law: NDArray[np.float64], uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draw one token per row by inverting the cumulative law: int64 [...].

    ``law`` float64 [..., vocab], rows >= 0 that sum to 1 (within 1e-6); ``uniforms`` float64 [...] in [0, 1). The token
    drawn always has positive probability: the first whose cumulative mass exceeds ``uniform * total``.

    Raises ContractError that names the row for a uniform out of range or a row that is no law, and for other shapes or
    dtypes.
    """
    law = require_array("sample", "law", law, (np.float64,))
    uniforms = require_array("sample", "uniforms", uniforms, (np.float64,))
    if law.ndim == 0 or uniforms.shape != law.shape[:-1]:
        raise ContractError.of("sample", "uniforms: shape", f"{list(law.shape[:-1])} (rows of law)", uniforms.shape)
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        row = _where(~((uniforms >= 0) & (uniforms < 1)))
        raise ContractError.of("sample", "uniforms", "in [0, 1)", f"{uniforms[row]} at row {row}")
    if law.shape[-1] == 0:
        raise ContractError.of("sample", "law: vocab", ">= 1", 0)
    cumulative = np.cumsum(law, axis=-1)
    total = cumulative[..., -1]
    sound = (np.abs(total - 1) <= 1e-6) & (law.min(axis=-1) >= 0)
    if not sound.all():
        row = _where(~sound)
        raise ContractError.of("sample", "law", "rows >= 0 that sum to 1", f"sum {total[row]} at row {row}")
    # uniform < 1 keeps the product below the total, so some token's cumulative mass exceeds it; that token raised the
    # cumulative mass, so its probability is positive.
    return np.asarray((cumulative <= (uniforms * total)[..., None]).sum(axis=-1), dtype=np.int64)


def _law(logits: NDArray[np.float64], params: LawParams) -> NDArray[np.float64]:
    """The law of checked rows [rows, vocab]."""
    rows, vocab = logits.shape
    if params.greedy:
        law = np.zeros_like(logits)
        law[np.arange(rows), logits.argmax(axis=1)] = 1
        return law
    weights = _weights(logits, logits.max(axis=1, keepdims=True), params.temperature)
    weights[weights < params.min_p] = 0
    if (params.top_k is not None and params.top_k < vocab) or params.top_p < 1:
        weights *= _first(logits, *_cut(logits, params))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _weights(logits: NDArray[np.float64], peak: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """exp((logits - peak) / temperature) [rows, vocab]; peak [rows, 1]."""
    with np.errstate(over="ignore"):  # a gap past float64 is a weight of 0
        scaled: NDArray[np.float64] = np.exp((logits - peak) / temperature)
    return scaled


def _cut(logits: NDArray[np.float64], params: LawParams) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Where top-k and then top-p cut each row: the last kept token's logit, and how many are kept; both [rows].

    Only the first tokens of each row are sorted: as many as top-k, then 8 times as many while a nucleus does not fit,
    the whole vocabulary at the most.
    """
    rows, vocab = logits.shape
    peak = logits.max(axis=1, keepdims=True)
    top_k = vocab if params.top_k is None else min(params.top_k, vocab)
    whole = _weights(logits, peak, params.temperature).sum(axis=1) if top_k == vocab else None
    width = min(vocab, _FIRST_LOOK if top_k == vocab else max(_FIRST_LOOK, top_k))
    while True:
        ranked = np.sort(np.partition(logits, vocab - width, axis=1)[:, vocab - width :], axis=1)[:, ::-1]
        kept = np.where(np.arange(width) < top_k, _weights(ranked, peak, params.temperature), 0)
        cumulative = np.cumsum(kept, axis=1)
        total = cumulative[:, -1] if whole is None else whole
        nucleus = 1 + np.count_nonzero(cumulative < (params.top_p * total)[:, None], axis=1)
        count = np.minimum(nucleus, top_k) if params.top_p < 1 else np.full(rows, top_k)
        if width == vocab or (count <= width).all():
            return ranked[np.arange(rows), count - 1], count
        width = min(vocab, 8 * width)


def _first(logits: NDArray[np.float64], last: NDArray[np.float64], count: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the first ``count`` tokens of each row, the last of which has logit ``last``: bool [rows, vocab]."""
    keep: NDArray[np.bool_] = logits > last[:, None]
    equal = logits == last[:, None]
    room = count - np.count_nonzero(keep, axis=1)
    for row in np.flatnonzero(np.count_nonzero(equal, axis=1) > room):
        equal[row, np.flatnonzero(equal[row])[room[row] :]] = False  # ties go to the smaller ids
    keep |= equal
    return keep


def _checked_rows(operator: str, logits: NDArray[Any]) -> NDArray[np.float64]:
    """A float64 copy [rows, vocab] of ``logits`` [..., vocab], without NaN or +inf and with a finite maximum."""
    require_array(operator, "logits", logits, _FLOATS)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ContractError.of(operator, "logits: shape", "[..., vocab >= 1]", list(logits.shape))
    peak = logits.max(axis=-1)
    if not np.isfinite(peak).all():
        bad = ~(logits < np.inf)
        if bad.any():
            *row, token = _where(bad)
            at = f"{logits[(*row, token)]} at row {tuple(row)}, token {token}"
            raise ContractError.of(operator, "logits", "finite or -inf", at)
        row_of = _where(peak == -np.inf)
        raise ContractError.of(operator, "logits", "a finite logit in each row", f"only -inf at row {row_of}")
    return np.array(logits, dtype=np.float64, order="C").reshape(-1, logits.shape[-1])


def _where(bad: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(bad)[0])


def _is_top_k(value: object) -> bool:
    try:
        require_int("LawParams", "top_k", value, minimum=1)
    except ContractError:
        return False
    return True
