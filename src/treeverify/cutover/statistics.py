"""Statistics of two samples of one plan: what differs between two modes, prompt by prompt.

The prompt is the unit: tokens of one text depend on each other, prompts do not. Every figure is a mean over prompts of
a mean over the prompt's tokens, and its standard error comes from the spread over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from treeverify.cutover.samples import Generation, Position, Sample

FLOOR = 1e-12
"""Least probability of what lies outside both lists of likeliest tokens: rounding may make it negative."""
PERMUTATIONS = 20_000
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` prompts with its interval, and a test whether it is beyond a margin.

    ``p``: chance of a mean so far out if the true one were at the margin. ``detectable``: the true mean that the test
    finds with the stated power.
    """

    mean: float
    low: float
    high: float
    p: float
    detectable: float
    n: int


@dataclass(frozen=True)
class Risk:
    """Which errors the tests may make: ``level`` of one test's false alarms, ``power`` of the detectable effect."""

    level: float
    power: float


def beyond(values: Sequence[float] | Array, margin: float, risk: Risk, *, both_sides: bool = False) -> Estimate:
    """Is the mean of one value per prompt above ``margin`` (or, with ``both_sides``, below ``-margin``)? Student's t.

    Skew to the right, as divergences have it, makes the test careful: it then alarms less often than ``level``.
    """
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    mean, error = float(x.mean()), float(x.std(ddof=1) / np.sqrt(n))
    sides = 2 if both_sides else 1
    distance = (abs(mean) if both_sides else mean) - margin
    certain = 0.0 if distance > 0 else 1.0  # no spread at all: the mean is what it is
    p = min(1.0, sides * float(stdtr(n - 1, -distance / error))) if error > 0 else certain
    half = float(stdtrit(n - 1, 1 - risk.level / 2)) * error
    reach = float(stdtrit(n - 1, 1 - risk.level / sides) + stdtrit(n - 1, risk.power)) * error
    return Estimate(mean, mean - half, mean + half, p, margin + reach, n)


def shorter(baseline: NDArray[np.int64], candidate: NDArray[np.int64], seed: int = 0) -> tuple[float, float]:
    """Are acceptance lengths shorter? Histograms [prompts, lengths] of steps; returns (distance, p).

    The distance is the largest by which the candidate's distribution function lies above the baseline's. Where both
    modes are right, exchanging the two answers to a prompt changes nothing, so the distances of all exchanges are
    equally likely: an exact permutation test, of which ``PERMUTATIONS`` random exchanges are drawn.
    """
    total, change = baseline + candidate, candidate - baseline

    def distances(swaps: NDArray[np.int64]) -> Array:
        first = baseline.sum(0) + swaps @ change
        below_first, below_second = np.cumsum(first, 1), np.cumsum(total.sum(0) - first, 1)
        gap = below_second / below_second[:, -1:] - below_first / below_first[:, -1:]
        largest: Array = gap.max(axis=1)
        return largest

    observed = float(distances(np.zeros((1, len(baseline)), dtype=np.int64))[0])
    swaps = np.random.default_rng(seed).integers(0, 2, size=(PERMUTATIONS, len(baseline)))
    at_least = int((distances(swaps) >= observed - 1e-12).sum())
    return observed, (1 + at_least) / (1 + PERMUTATIONS)


def histograms(generations: Sequence[Generation]) -> NDArray[np.int64] | None:
    """Steps by acceptance length [prompts, longest], column 0 being length 1; None where a server did not tell."""
    told = [generation.accepted for generation in generations]
    if any(counts is None for counts in told):
        return None
    rows = [counts or [] for counts in told]
    found = np.zeros((len(rows), max([1, *(len(row) for row in rows)])), dtype=np.int64)
    for row, counts in zip(found, rows, strict=True):
        row[: len(counts)] = counts
    return found


@dataclass(frozen=True)
class Pair:
    """One position that both samples reached in the same context."""

    prompt: str
    baseline: Position
    candidate: Position


def forced_pairs(baseline: Sample, candidate: Sample) -> list[Pair]:
    """The comparable positions of the probes: up to the first token that differs, included; none if prefill's does."""
    theirs = {(probe.prompt, probe.offset): probe for probe in candidate.probes}
    found = []
    for probe in baseline.probes:
        other = theirs.get((probe.prompt, probe.offset))
        if other is None or other.first != probe.first:
            continue
        for mine, its in zip(probe.positions, other.positions, strict=True):
            found.append(Pair(probe.prompt, mine, its))
            if mine.token != its.token:
                break
    return found


def divergence(pair: Pair) -> float:
    """Kullback-Leibler divergence, baseline from candidate, in nats, as far as the two lists of likeliest tokens show.

    A lower bound of the whole vocabulary's. Tokens that both lists name count singly. Of those that the baseline alone
    names the candidate's list says that none is likelier than its last, and all no likelier than what it leaves; where
    that bound tells them from the rest, they count together, else they are part of the rest.
    """
    p, q = dict(pair.baseline.top), dict(pair.candidate.top)
    common, missing = sorted(p.keys() & q.keys()), sorted(p.keys() - q.keys())
    log_p = np.array([p[token] for token in common])
    log_q = np.array([q[token] for token in common])
    rest_p, rest_q = (max(FLOOR, 1.0 - float(np.exp(logs).sum())) for logs in (log_p, log_q))
    total = float((np.exp(log_p) * (log_p - log_q)).sum())
    lost = float(np.exp([p[token] for token in missing]).sum())
    unlisted = max(FLOOR, 1.0 - float(np.exp(list(q.values())).sum()))
    most = min(len(missing) * float(np.exp(pair.candidate.top[-1][1])), unlisted)
    if lost * rest_q > most * rest_p and most > 0:
        total += _term(lost, most)
        rest_p, rest_q = max(FLOOR, rest_p - lost), max(FLOOR, rest_q - most)
    return max(0.0, total + _term(rest_p, rest_q))


def _term(p: float, q: float) -> float:
    return p * float(np.log(p / q))


def logprob_change(pair: Pair) -> float:
    """Candidate's minus baseline's log-probability of the baseline's token (at most its list's last, if not listed)."""
    theirs = dict(pair.candidate.top)
    return theirs.get(pair.baseline.token, pair.candidate.top[-1][1]) - pair.baseline.logprob


def disagreement(pair: Pair, k: int, near_tie: float) -> tuple[float, float]:
    """(share of the baseline's ``k`` likeliest tokens that are not the candidate's, share that near-ties explain).

    A token may leave the set by rounding only if its log-probability is within ``near_tie`` of the first one outside.
    """
    ours, theirs = pair.baseline.top, pair.candidate.top
    lost = {token for token, _ in ours[:k]} - {token for token, _ in theirs[:k]}
    outside = ours[k][1] if len(ours) > k else -np.inf
    movable = sum(logprob - outside <= near_tie for _, logprob in ours[:k])
    return len(lost) / k, movable / k


def by_prompt(pairs: Sequence[Pair], values: Sequence[float]) -> Array:
    """The mean of ``values`` over each prompt's pairs, in the order of the prompts' first appearance."""
    groups: dict[str, list[float]] = {}
    for pair, value in zip(pairs, values, strict=True):
        groups.setdefault(pair.prompt, []).append(value)
    return np.array([np.mean(group) for group in groups.values()])


def speed_ratio(baseline: Sample, candidate: Sample, risk: Risk) -> Estimate | None:
    """Candidate's tokens per second over the baseline's, geometric mean over prompts; None without two timed ones."""

    def rates(sample: Sample) -> dict[str, float]:
        logs: dict[str, list[float]] = {}
        for window in sample.speed:
            logs.setdefault(window.prompt, []).append(float(np.log(window.tokens / window.seconds)))
        return {prompt: float(np.median(values)) for prompt, values in logs.items()}

    before, after = rates(baseline), rates(candidate)
    common = [prompt for prompt in before if prompt in after]
    if len(common) < 2:
        return None
    found = beyond([before[prompt] - after[prompt] for prompt in common], 0.0, risk)
    return Estimate(
        float(np.exp(-found.mean)),
        float(np.exp(-found.high)),
        float(np.exp(-found.low)),
        found.p,
        float(np.exp(-found.detectable)),
        found.n,
    )
