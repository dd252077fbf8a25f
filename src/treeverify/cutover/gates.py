"""The gates of a cutover: pure functions from samples and states to verdicts. Nothing here talks to a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from treeverify.control.schema import PluginState
from treeverify.cutover.limits import Limits
from treeverify.cutover.samples import Sample

Stage = Literal["validate", "soak", "on"]
"""``validate``: short, synthetic load; ``soak``: live traffic under validate; ``on``: ours serves."""


class Verdict(BaseModel):
    """One gate's answer. ``reason`` is one line for an operator: why it passed, or what is wrong and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Stage
    gate: str
    passed: bool
    figures: dict[str, float | int | str | None]
    threshold: str
    reason: str


def judge(
    stage: Stage,
    baseline: Sample | None,
    candidate: Sample | None,
    states_before: Sequence[PluginState],
    states_after: Sequence[PluginState],
    limits: Limits,
) -> list[Verdict]:
    """Judge one stage; it may be left only if every verdict passed.

    ``states_before`` were read after the switch into the stage and before its load, ``states_after`` after it; one
    entry per data-parallel group. ``validate`` needs both samples: parity, shapes, generation, errors. ``soak`` needs
    none (those given are judged as in ``validate``): parity, shapes, errors. ``on`` needs both: mode, shapes,
    generation, statistics, speed, errors. Raises ConfigError where a needed sample is missing or two plans differ.
    """
    raise NotImplementedError
