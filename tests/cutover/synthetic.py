"""Samples and states made up for tests: a random model's laws, and counters of a server that does as it should."""

from __future__ import annotations

import numpy as np

from treeverify.control.schema import BackendState, LayerCounts, ModeCounts, PluginState, RankState, Shape
from treeverify.cutover.samples import Generation, Plan, Position, Probe, Prompt, Sample, Window
from treeverify.env import VerifyMode

VOCAB = 40
TOP = 20


def plan(prompts: int = 16, **sizes: int) -> Plan:
    chosen = [Prompt(name=f"p{i}", input=[1, i], forced=list(range(10))) for i in range(prompts)]
    return Plan(prompts=chosen, top_logprobs=TOP, new_tokens=8, probes=2, probe_tokens=5, **sizes)


def position(logits: np.ndarray) -> Position:
    """The greedy position of one row of logits."""
    logs = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-logs, kind="stable")[:TOP]
    top = [(int(token), float(logs[token])) for token in order]
    return Position(token=top[0][0], logprob=top[0][1], top=top)


def sample(
    seed: int = 0, noise: float = 0.0, noise_seed: int = 1, prompts: int = 16, accepted: list[int] | None = None
) -> Sample:
    """Laws drawn from ``seed``, their logits moved by normal noise; texts do not influence what follows."""
    laws, moved, asked = np.random.default_rng(seed), np.random.default_rng(noise_seed), plan(prompts)

    def row() -> Position:
        return position(laws.normal(0, 3, VOCAB) + noise * moved.normal(0, 1, VOCAB))

    generations = [
        Generation(
            prompt=prompt.name,
            positions=[row() for _ in range(asked.new_tokens)],
            verify_steps=10,
            accepted=accepted or [2, 3, 5],
        )
        for prompt in asked.prompts
    ]
    probes = [
        Probe(prompt=prompt.name, offset=offset, first=7, positions=[row() for _ in range(asked.probe_tokens - 1)])
        for prompt in asked.prompts
        for offset in (3, 6)
    ]
    speed = [Window(prompt=prompt.name, run=0, tokens=8, seconds=1.0) for prompt in asked.prompts]
    return Sample(
        taken_at="2026-01-01T00:00:00+00:00",
        url="http://here",
        mode="off",
        plan=asked,
        generations=generations,
        probes=probes,
        speed=speed,
        failures=[],
    )


def layer(number: int, rows: int, beyond: int = 0, **changes: float) -> LayerCounts:
    """Counts of a layer in which ``beyond`` rows are between 1 and 2 ULP off, the others within half."""
    counts = {
        "layer": number,
        "calls": 10,
        "rows": rows,
        "mismatched_rows": 0,
        "max_abs": 0.01,
        "max_row_ulp": 1.5 if beyond else 0.4,
        "max_relative": 0.001,
        "worst_node": 2,
        "worst_head": 3,
        "histogram": [0, rows - beyond, 0, beyond, 0, 0, 0, 0, 0, 0],
    }
    return LayerCounts(**{**counts, **changes})


def state(
    mode: str = "validate",
    rows: int = 0,
    calls: dict[str, int] | None = None,
    layers: list[LayerCounts] | None = None,
    shapes: list[Shape] | None = None,
    **rank: int,
) -> PluginState:
    """One group of one rank."""
    backend = BackendState(
        kernel="portable",
        device="cuda:0",
        heads=8,
        nodes=17,
        bound_ulp=2.0,
        breaches=0,
        dumps=0,
        shapes=[shape(4, "off", "validate")] if shapes is None else shapes,
        left_to_parent={},
        served={name: ModeCounts(calls=count, rows=count * 136) for name, count in (calls or {}).items()},
        layers=[layer(n, rows) for n in range(3)] if layers is None and rows else layers or [],
    )
    place = {"rank": 0, "pid": 11, "switches": 1, "switched_at": 5, **rank}
    served = RankState(mode=mode, allowed=list(VerifyMode), backends=[backend], **place)
    return PluginState(version="0", engine="test", ranks=[served])


def shape(requests: int, *modes: str, nodes: int = 17) -> Shape:
    return Shape(requests=requests, nodes=nodes, heads=8, mask="uint8", modes=list(modes))
