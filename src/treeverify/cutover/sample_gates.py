"""Gates on what the server generates: text parity, statistics of two modes, speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeverify.cutover import statistics
from treeverify.cutover.limits import Limits
from treeverify.cutover.samples import Generation, Position, Sample
from treeverify.cutover.statistics import Estimate, Risk
from treeverify.cutover.verdict import Figure, Kind, Parted, Verdict, few
from treeverify.holm import holm

FAMILY = ("acceptance", "logprob", "top-1", "top-k", "kl")
"""The statistical gates; a run's ``alpha`` is shared by all of them, and by all looks."""


def generation(stage: Kind, baseline: Sample, candidate: Sample, limits: Limits) -> Verdict:
    """Greedy texts are the same, or part only where two tokens were nearly equally likely.

    At the first difference both modes saw the same context. The gap that must have moved is the baseline's between the
    two tokens plus the candidate's; what rounding can move is ``limits.near_tie``. A text that differs at its first
    token differs in prefill, which is not ours. Without log-probabilities the gap is unknown: a text that parts is
    listed and not judged.
    """
    theirs = {found.prompt: found for found in candidate.generations}
    texts = [
        text
        for mine in baseline.generations
        if (text := _parted(mine, theirs.get(mine.prompt), limits.near_tie)) is not None
    ]
    count = Counter(text.judged for text in texts)
    served = [text for text in texts if text.judged != "prefill" and text.place is not None]
    same, ties, unknown = len(baseline.generations) - len(texts), count["near-tie"], count["not judged"]
    figures: dict[str, Figure] = {
        "texts": len(baseline.generations),
        "same": same,
        "near_ties": ties,
        "differ_in_prefill": count["prefill"],
        "faults": count["fault"],
        "first_difference": min((text.place for text in served if text.place is not None), default=None),
        "largest_gap": max((text.gap for text in served if text.gap is not None), default=None),
        "not_judged": unknown,
    }
    reason = f"{same} of {len(baseline.generations)} texts the same, {ties} part at a near-tie"
    if unknown:
        places = [f"{text.prompt} at token {text.place}" for text in texts if text.judged == "not judged"]
        reason += f"; how likely the other token was is not known where they part: {few(places)}"
    faults = [_fault(text) for text in texts if text.judged == "fault"]
    return Verdict(
        stage=stage,
        gate="generation",
        passed=None if unknown and not faults else same + ties > 0 and not faults,
        figures=figures,
        threshold=f"texts part only where a gap of at most {limits.near_tie:g} nats closes",
        reason=few(faults) or reason,
        texts=tuple(texts),
    )


def _parted(mine: Generation, its: Generation | None, near_tie: float) -> Parted | None:
    """Return where and by how much the candidate's text parts from the baseline's; None: they are the same."""
    if its is None:
        return Parted(prompt=mine.prompt, place=None, gap=None, judged="fault")
    place = _first_difference(mine, its)
    if place is None:
        return None
    gap = moved_gap(mine.positions[place], its.positions[place]) if mine.positions else None
    if place == 0:
        return Parted(prompt=mine.prompt, place=place, gap=gap, judged="prefill")
    if gap is None:
        return Parted(prompt=mine.prompt, place=place, gap=None, judged="not judged")
    return Parted(prompt=mine.prompt, place=place, gap=gap, judged="near-tie" if gap <= near_tie else "fault")


def _fault(text: Parted) -> str:
    if text.place is None:
        return f"{text.prompt}: no candidate text"
    return f"{text.prompt}: token {text.place}: the gap moved by {text.gap:.3g} nats"


def moved_gap(mine: Position, its: Position) -> float:
    """By how many nats the gap between the two tokens moved, at least; a token that is not listed is past the list."""
    before = mine.logprob - dict(mine.top).get(its.token, mine.top[-1][1])
    after = its.logprob - dict(its.top).get(mine.token, its.top[-1][1])
    return before + after


@dataclass(frozen=True)
class _Finding:
    """One statistical gate before the correction for many tests."""

    gate: str
    p: float
    figures: dict[str, Figure]
    threshold: str
    what: str


def statistical(stage: Kind, baseline: Sample, candidate: Sample, limits: Limits) -> list[Verdict]:
    """The five statistical gates, Holm-corrected; one verdict ``statistics`` instead if there is too little to judge.

    Without log-probabilities ``acceptance`` alone is judged, and of all prompts. A gate fails where its figure is
    beyond its margin and chance does not explain it. It cannot show that nothing differs: ``detectable`` says what it
    would have found.
    """
    judged = FAMILY if baseline.plan.logprobs else FAMILY[:1]
    pairs = statistics.forced_pairs(baseline, candidate)
    compared: Sequence[statistics.Pair | Generation] = pairs if baseline.plan.logprobs else candidate.generations
    prompts = len({found.prompt for found in compared})
    risk = Risk(limits.alpha / limits.looks / len(judged), limits.power)
    if prompts < limits.prompts:
        return [_too_little(stage, f"{prompts} prompts can be compared", limits)]
    lengths = _acceptance(baseline, candidate, risk)
    if lengths is None:
        return [_too_little(stage, "the server does not tell its acceptance lengths", limits)]
    findings = [lengths, *(_forced(pairs, limits, risk) if baseline.plan.logprobs else [])]
    adjusted = holm([finding.p for finding in findings])
    verdicts = [_verdict(stage, finding, p, limits) for finding, p in zip(findings, adjusted, strict=True)]
    return verdicts + [_without_logprobs(stage, gate) for gate in FAMILY if gate not in judged]


def _verdict(stage: Kind, finding: _Finding, p: float, limits: Limits) -> Verdict:
    alarm = p <= limits.alpha / limits.looks
    blind = finding.gate == "kl" and float(finding.figures["detectable"] or 0) > limits.detectable_kl
    return Verdict(
        stage=stage,
        gate=finding.gate,
        passed=not (alarm or blind),
        figures={**finding.figures, "p_holm": p},
        threshold=f"{finding.threshold}, at Holm-corrected p > {limits.alpha / limits.looks:g}",
        reason=finding.what
        + (f": more than chance explains (p {p:.2g})" if alarm else "")
        + (f": too noisy to detect {limits.detectable_kl:g}; ask more prompts" if blind else ""),
    )


def _without_logprobs(stage: Kind, gate: str) -> Verdict:
    return Verdict(
        stage=stage,
        gate=gate,
        passed=None,
        figures={},
        threshold="none: the operator goes on without log-probabilities",
        reason="the server was not asked for log-probabilities",
    )


def speed(stage: Kind, baseline: Sample, candidate: Sample, limits: Limits) -> Verdict:
    """Tokens per second, candidate over baseline; fails where the whole interval lies below the threshold.

    Without a threshold it is not judged.
    """
    found = statistics.speed_ratio(baseline, candidate, Risk(limits.alpha, limits.power))
    floor = limits.speed_ratio
    threshold = "recorded, not judged" if floor is None else f"the {1 - limits.alpha:.0%} interval reaches {floor:g}"
    if found is None:
        return Verdict(
            stage=stage,
            gate="speed",
            passed=None if floor is None else False,
            figures={"prompts": 0},
            threshold=threshold,
            reason="fewer than two prompts were timed in both modes",
        )
    return Verdict(
        stage=stage,
        gate="speed",
        passed=None if floor is None else found.high >= floor,
        figures={"ratio": found.mean, "low": found.low, "high": found.high, "prompts": found.n},
        threshold=threshold,
        reason=f"{found.mean:.3f} of the baseline's tokens per second [{found.low:.3f}, {found.high:.3f}]",
    )


def _first_difference(mine: Generation, its: Generation) -> int | None:
    pairs = zip(mine.tokens, its.tokens, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), None)


def _acceptance(baseline: Sample, candidate: Sample, risk: Risk) -> _Finding | None:
    """Acceptance lengths of the generations, as distributions; None where a server did not tell them."""
    theirs = {found.prompt: found for found in candidate.generations}
    mine = [found for found in baseline.generations if found.prompt in theirs]
    before, after = statistics.histograms(mine), statistics.histograms([theirs[found.prompt] for found in mine])
    if before is None or after is None or not mine or min(before.sum(1).min(), after.sum(1).min()) == 0:
        return None
    width = max(before.shape[1], after.shape[1])
    before, after = (np.pad(found, ((0, 0), (0, width - found.shape[1]))) for found in (before, after))
    lengths = np.arange(1, width + 1)
    means = [(found @ lengths) / found.sum(1) for found in (before, after)]
    distance, p = statistics.shorter(before, after)
    drop = statistics.beyond(means[0] - means[1], 0.0, risk)
    return _Finding(
        "acceptance",
        p,
        {
            "baseline": float(means[0].mean()),
            "candidate": float(means[1].mean()),
            "drop": drop.mean,
            "low": drop.low,
            "high": drop.high,
            "distance": distance,
            "p": p,
            "detectable": drop.detectable,
        },
        "acceptance lengths are not shorter",
        f"acceptance length {means[0].mean():.3f}, then {means[1].mean():.3f} [drop {drop.low:.3f} to {drop.high:.3f}]",
    )


def _forced(pairs: list[statistics.Pair], limits: Limits, risk: Risk) -> list[_Finding]:
    """Log-probability, top-1, top-k and divergence on the forced text."""
    k = limits.top_k
    changes = statistics.by_prompt(pairs, [statistics.logprob_change(pair) for pair in pairs])
    kl = statistics.by_prompt(pairs, [statistics.divergence(pair) for pair in pairs])
    findings = [
        _finding(
            "logprob",
            statistics.beyond(changes, limits.logprob, risk, both_sides=True),
            f"mean change within {limits.logprob:g} nats per token",
            "log-probability changed by",
            len(pairs),
        )
    ]
    for gate, size in (("top-1", 1), ("top-k", k)):
        shares = np.array([statistics.disagreement(pair, size, limits.near_tie) for pair in pairs])
        unexplained = statistics.beyond(statistics.by_prompt(pairs, shares[:, 0] - shares[:, 1]), 0.0, risk)
        findings.append(
            _finding(
                gate,
                unexplained,
                "tokens leave the set only as often as near-ties explain",
                f"{shares[:, 0].mean():.2%} of the {size} likeliest left, near-ties explain {shares[:, 1].mean():.2%}; "
                "beyond that",
                len(pairs),
            )
        )
    divergence = statistics.beyond(kl, limits.kl, risk)
    findings.append(_finding("kl", divergence, f"mean KL within {limits.kl:g} nats per token", "KL", len(pairs)))
    return findings


def _finding(gate: str, found: Estimate, threshold: str, what: str, positions: int) -> _Finding:
    figures: dict[str, Figure] = {
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "p": found.p,
        "detectable": found.detectable,
        "prompts": found.n,
        "positions": positions,
    }
    return _Finding(gate, found.p, figures, threshold, f"{what} {found.mean:.3g} [{found.low:.3g}, {found.high:.3g}]")


def _too_little(stage: Kind, what: str, limits: Limits) -> Verdict:
    return Verdict(
        stage=stage,
        gate="statistics",
        passed=False,
        figures={},
        threshold=f"{limits.prompts} prompts with probes in both samples, and acceptance lengths",
        reason=what,
    )
