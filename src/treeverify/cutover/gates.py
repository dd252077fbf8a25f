"""The gates of a cutover: pure functions from samples and states to verdicts. Nothing here talks to a server."""

from __future__ import annotations

from collections.abc import Sequence

from treeverify.control.schema import PluginState
from treeverify.cutover.limits import Limits
from treeverify.cutover.sample_gates import generation, speed, statistical
from treeverify.cutover.samples import Sample
from treeverify.cutover.state_gates import errors, mode, parity, shapes
from treeverify.cutover.verdict import Kind, Verdict
from treeverify.errors import ConfigError

__all__ = ["Kind", "Verdict", "judge"]


def judge(
    stage: Kind,
    baseline: Sample | None,
    candidate: Sample | None,
    states_before: Sequence[PluginState],
    states_after: Sequence[PluginState],
    limits: Limits,
) -> list[Verdict]:
    """Judge one stage; it may be left only if no verdict failed and one passed.

    ``states_before`` were read after the switch into the stage and before its load, ``states_after`` after it; one
    entry per data-parallel group. ``validate`` needs both samples: mode, errors, parity, shapes, generation. ``soak``
    needs none: mode, errors, parity, shapes. ``on`` needs both: mode, errors, shapes, generation, statistics, speed.
    Samples without log-probabilities leave some verdicts not judged (``passed`` None).
    Raises ConfigError where a needed sample is missing or two plans differ.
    """
    if stage != "soak" and (baseline is None or candidate is None):
        raise ConfigError(f"gates: stage {stage}: expected a baseline and a candidate, got only one or none")
    verdicts = [
        mode(stage, states_before, states_after),
        errors(stage, baseline, candidate, states_before, states_after),
    ]
    if stage != "on":
        verdicts.append(parity(stage, states_before, states_after, limits))
    verdicts.append(shapes(stage, states_after))
    if baseline is None or candidate is None:
        return verdicts
    if baseline.plan != candidate.plan:
        raise ConfigError("gates: expected two samples of one plan, got two plans")
    if baseline.plan.logprobs and baseline.plan.top_logprobs <= limits.top_k:
        raise ConfigError(
            f"plan: top_logprobs: expected more than top_k {limits.top_k}, got {baseline.plan.top_logprobs}"
        )
    verdicts.append(generation(stage, baseline, candidate, limits))
    if stage == "on":
        verdicts += statistical(stage, baseline, candidate, limits)
        verdicts.append(speed(stage, baseline, candidate, limits))
    return verdicts
