"""Tokens per second of the embedded engine: plain, chain and tree decoding of the same held-out prompts, one at a time.

A *run* decodes every prompt once in one mode: free-running, T = 0, stop tokens ignored. Modes take turns prompt by
prompt, in an order that rotates, so that a busy machine slows all of them alike; a warm-up run comes first, and there
each mode's tokens are compared with plain decoding's. Reported: the median over the runs of tokens / second, of
*decode* time (the steps, without prefill) and of *all* time; the first token comes from prefill and counts in the
second only. Stages are the engine's own metrics, per step, over all runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np

from treeverify.bench import record
from treeverify.bench.timing import median, spread
from treeverify.engine.engine import Engine
from treeverify.engine.metrics import STAGES
from treeverify.engine.request import AUTO, Budget, SamplingParams
from treeverify.errors import ConfigError
from treeverify.models.heldout import Heldout

BENCHMARK = "speed"


class Mode(NamedTuple):
    """A draft mode and its budget (None: the mode's own)."""

    draft: str
    budget: Budget


MODES: Mapping[str, Mode] = {
    "plain": Mode("none", None),
    "chain": Mode("chain", None),
    **{f"tree {budget}": Mode("tree", budget) for budget in (8, 16, 32)},
}
WITH_AUTO: Mapping[str, Mode] = {**MODES, AUTO: Mode("tree", AUTO)}


@dataclass(frozen=True)
class Options:
    """What a run is, how many there are, and whom to tell about each prompt decoded."""

    new_tokens: int = 128
    runs: int = 5
    modes: Mapping[str, Mode] = field(default_factory=lambda: MODES)
    advance: Callable[[str], None] = lambda _: None

    def decodes(self, texts: int) -> int:
        """Calls of ``advance``."""
        return (1 + self.runs) * len(self.modes) * texts


@dataclass
class _Tally:
    """What one mode has done: seconds by run, and totals over the measured runs."""

    decode: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)
    decodes: list[float] = field(default_factory=list)  # decode seconds of each prompt of each run
    widths: Counter[int] = field(default_factory=Counter)
    tokens: list[list[int]] = field(default_factory=list)  # of the warm-up run, by prompt
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    steps: int = 0
    step_tokens: int = 0


def measure(engine: Engine, texts: Sequence[Heldout], options: Options) -> record.Record:
    """Measure every mode over ``texts``; returns the record's ``measures``: ``modes``, and ``auto`` if it was one.

    Raises ConfigError without texts or runs, for a request that ``engine`` refuses, and if a mode's tokens differ from
    plain decoding's (its speed would mean nothing).
    """
    if not texts or options.runs < 1 or options.new_tokens < 2:
        raise ConfigError("speed: expected at least one text, one run and two new tokens")
    tallies = {name: _Tally() for name in options.modes}
    names = list(options.modes)
    for run in range(-1, options.runs):
        if run >= 0:
            for tally in tallies.values():
                tally.decode.append(0.0)
                tally.all.append(0.0)
        for index, text in enumerate(texts):
            turn = (index + run) % len(names)
            for name in names[turn:] + names[:turn]:
                _decode(engine, text, options, name, tallies[name], warmup=run < 0)
                options.advance(f"{name}: {text.file}")
        if run < 0:
            _check_tokens(tallies)
    decoded = len(texts) * (options.new_tokens - 1)
    found: record.Record = {"modes": {name: _figures(tally, decoded, len(texts)) for name, tally in tallies.items()}}
    if AUTO in tallies and len(tallies) > 1:
        found[AUTO] = _against_best(tallies)
    return found


def ratios(measures: Mapping[str, Mapping[str, object]], key: str) -> dict[str, float]:
    """Tokens/s of each mode over those of plain decoding, medians over medians."""

    def speed(name: str) -> float:
        return float(str(measures[name][key]))

    return {name: speed(name) / speed("plain") for name in measures}


def _decode(engine: Engine, text: Heldout, options: Options, name: str, tally: _Tally, *, warmup: bool) -> None:
    params = SamplingParams(max_new_tokens=options.new_tokens, stop_token_ids=())
    mode = options.modes[name]
    before, widths = dict(engine.metrics.seconds), engine.metrics.widths.copy()
    began = perf_counter()
    result = engine.generate(text.prompt_ids, params, draft=mode.draft, budget=mode.budget)
    seconds = perf_counter() - began
    if warmup:
        tally.tokens.append(result.tokens)
        return
    stages = {stage: engine.metrics.seconds[stage] - before[stage] for stage in STAGES}
    tally.all[-1] += seconds
    tally.decodes.append(seconds - stages["prefill"])
    tally.decode[-1] += tally.decodes[-1]
    tally.widths += engine.metrics.widths - widths
    tally.steps += len(result.acceptance_lengths)
    tally.step_tokens += sum(result.acceptance_lengths)
    for stage in STAGES:
        tally.stages[stage] += stages[stage]


def _check_tokens(tallies: Mapping[str, _Tally]) -> None:
    plain = tallies.get("plain")
    for name, tally in tallies.items():
        if plain is not None and tally.tokens != plain.tokens:
            raise ConfigError(f"speed: {name} gave other tokens than plain decoding")


def _against_best(tallies: Mapping[str, _Tally], draws: int = 2000) -> dict[str, object]:
    """Tokens/s of ``auto`` over the best other mode's (by its total time), with a 95% interval.

    The interval is a bootstrap over the decodes, one prompt in one run: there all modes ran within seconds, so they are
    drawn together. The rival is the best after the fact, which favours it.
    """
    rivals = {name: sum(tally.decodes) for name, tally in tallies.items() if name != AUTO}
    best = min(rivals, key=lambda name: rivals[name])
    mine, theirs = np.array(tallies[AUTO].decodes), np.array(tallies[best].decodes)
    chosen = np.random.default_rng(0).integers(0, len(mine), (draws, len(mine)))
    low, high = np.quantile(theirs[chosen].sum(axis=1) / mine[chosen].sum(axis=1), (0.025, 0.975))
    widths = {str(width): count for width, count in sorted(tallies[AUTO].widths.items())}
    ratio = theirs.sum() / mine.sum()
    return {"best": best, "ratio": round(ratio, 4), "interval_95": [round(low, 4), round(high, 4)], "widths": widths}


def _figures(tally: _Tally, decoded: int, texts: int) -> dict[str, object]:
    """The record's figures of one mode; ``other_ms`` is step time outside every stage."""
    decode = [decoded / seconds for seconds in tally.decode]
    whole = [(decoded + texts) / seconds for seconds in tally.all]
    stages = {f"{name}_ms": 1e3 * tally.stages[name] / tally.steps for name in STAGES if name != "prefill"}
    step = 1e3 * sum(tally.decode) / tally.steps
    stages["other_ms"] = step - sum(stages.values())
    return {
        "tokens_per_second": round(median(decode), 2),
        "tokens_per_second_runs": [round(speed, 2) for speed in decode],
        "tokens_per_second_spread": round(spread(decode), 4),
        "tokens_per_second_with_prefill": round(median(whole), 2),
        "acceptance_length": round(tally.step_tokens / tally.steps, 4),
        "step_ms": round(step, 3),
        "stages": {name: round(value, 3) for name, value in stages.items()},
        "prefill_ms_per_prompt": round(1e3 * tally.stages["prefill"] / (len(tally.decode) * texts), 3),
    }
