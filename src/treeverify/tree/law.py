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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import ConfigError, ContractError
from treeverify.tree._arrays import INT64_MAX, frozen, require_array, require_int

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


@dataclass(frozen=True, eq=False, slots=True)
class RowParams:
    """`LawParams` of many rows as arrays [rows], read-only: temperature, top_p, min_p float64; top_k int64.

    ``top_k`` of the largest int64 stands for "off". Build it with `of`, which takes validated parameters.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]

    @classmethod
    def of(cls, params: Sequence[LawParams], repeats: int | Sequence[int] = 1) -> RowParams:
        """Stack one `LawParams` per request, each repeated for ``repeats`` rows (one number, or one per request)."""
        top_k = [INT64_MAX if p.top_k is None else p.top_k for p in params]
        return cls(
            frozen(np.repeat(np.array([p.temperature for p in params], dtype=np.float64), repeats)),
            frozen(np.repeat(np.array(top_k, dtype=np.int64), repeats)),
            frozen(np.repeat(np.array([p.top_p for p in params], dtype=np.float64), repeats)),
            frozen(np.repeat(np.array([p.min_p for p in params], dtype=np.float64), repeats)),
        )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.temperature)


def target_law(logits: NDArray[Any], params: LawParams) -> NDArray[np.float64]:
    """Return the law float64 [..., vocab] of each row of ``logits`` [..., vocab] (float16, float32 or float64).

    A logit of -inf has probability 0. Raises ContractError that names row and token for a NaN or +inf logit, names the
    row if all its logits are -inf, and for another dtype, a scalar or an empty vocabulary.
    """
    rows = _checked_rows("target_law", logits)
    return _law(rows, RowParams.of([params], len(rows))).reshape(logits.shape)


def target_law_rows(logits: NDArray[Any], params: RowParams) -> NDArray[np.float64]:
    """Return the law float64 [rows, vocab] of ``logits`` [rows, vocab], each row with its own parameters.

    As `target_law`; raises ContractError also when ``params`` has another number of rows.
    """
    require_array("target_law_rows", "logits", logits, _FLOATS, ndim=2)
    rows = _checked_rows("target_law_rows", logits)
    if params.rows != len(rows):
        raise ContractError.of("target_law_rows", "params: rows", f"{len(rows)} (as logits)", params.rows)
    return _law(rows, params)


def greedy_tokens(logits: NDArray[Any]) -> NDArray[np.int64]:
    """Return the argmax int64 [...] of ``logits`` [..., vocab]: what `sample` draws at temperature 0, without the law.

    Equal logits: the smaller id. Raises ContractError as `target_law` does.
    """
    rows = _checked_rows("greedy_tokens", logits)
    return np.asarray(rows.argmax(axis=1), dtype=np.int64).reshape(logits.shape[:-1])


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


def _law(logits: NDArray[np.float64], params: RowParams) -> NDArray[np.float64]:
    """The law of checked rows [rows, vocab]."""
    vocab = logits.shape[1]
    law = np.zeros_like(logits)
    greedy = params.temperature < GREEDY_BELOW
    law[greedy, logits[greedy].argmax(axis=1)] = 1
    drawn = np.flatnonzero(~greedy)
    if len(drawn) == 0:
        return law
    logits, temperature = logits[drawn], params.temperature[drawn, None]
    top_k, top_p, min_p = params.top_k[drawn], params.top_p[drawn], params.min_p[drawn]
    weights = _weights(logits, logits.max(axis=1, keepdims=True), temperature)
    weights[weights < min_p[:, None]] = 0
    filtered = np.flatnonzero((top_k < vocab) | (top_p < 1))
    if len(filtered):
        last, count = _cut(logits[filtered], temperature[filtered], top_k[filtered], top_p[filtered])
        weights[filtered] *= _first(logits[filtered], last, count)
    law[drawn] = weights / weights.sum(axis=1, keepdims=True)
    return law


def _weights(
    logits: NDArray[np.float64], peak: NDArray[np.float64], temperature: NDArray[np.float64]
) -> NDArray[np.float64]:
    """exp((logits - peak) / temperature) [rows, vocab]; peak and temperature [rows, 1]."""
    with np.errstate(over="ignore"):  # a gap past float64 is a weight of 0
        scaled: NDArray[np.float64] = np.exp((logits - peak) / temperature)
    return scaled


def _cut(
    logits: NDArray[np.float64], temperature: NDArray[np.float64], top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Where top-k and then top-p cut each row: the last kept token's logit, and how many are kept; both [rows].

    Only the first tokens of each row are sorted: as many as the largest top-k, then 8 times as many while a nucleus
    does not fit, the whole vocabulary at the most.
    """
    rows, vocab = logits.shape
    peak = logits.max(axis=1, keepdims=True)
    limited = top_k < vocab
    mass = np.zeros(rows) if limited.all() else _weights(logits, peak, temperature).sum(axis=1)
    width = min(vocab, int(max(_FIRST_LOOK, top_k[limited].max(initial=1))))
    while True:
        ranked = np.sort(np.partition(logits, vocab - width, axis=1)[:, vocab - width :], axis=1)[:, ::-1]
        kept = np.where(np.arange(width) < top_k[:, None], _weights(ranked, peak, temperature), 0)
        cumulative = np.cumsum(kept, axis=1)
        total = np.where(limited, cumulative[:, -1], mass)
        nucleus = 1 + np.count_nonzero(cumulative < (top_p * total)[:, None], axis=1)
        count = np.minimum(np.where(top_p < 1, nucleus, vocab), np.minimum(top_k, vocab))
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
