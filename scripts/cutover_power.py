"""What the cutover's statistics find, and how often they cry wolf: measured on the embedded engine.

``measure`` takes one sample of all held-out prompts for each kernel (right and broken on purpose) and keeps it as JSON;
the requests run in batches through the engine, in the form that a server answers in. ``judge`` draws prompts with
replacement from these samples (a bootstrap: the engine is not run again), judges each draw with the gates as they are,
and appends one record per kernel and number of prompts.

    python scripts/cutover_power.py measure FOLDER --dtype bfloat16
    python scripts/cutover_power.py judge FOLDER --dtype bfloat16 --out benchmarks/results/cutover-power.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from treeverify.bench.record import Record, append, environment
from treeverify.cutover import statistics
from treeverify.cutover.asking import positions
from treeverify.cutover.limits import Limits
from treeverify.cutover.sample_gates import generation, statistical
from treeverify.cutover.samples import Generation, Plan, Probe, Sample
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import Result, SamplingParams
from treeverify.engine.verify import ours
from treeverify.errors import ConfigError
from treeverify.models.pair import load_pair
from treeverify.serve.answer import Asked, answer
from treeverify.serve.faults import plant
from treeverify.serve.server import DTYPES

KERNELS = ("off", "on", "one-head-2ulp", "swapped-heads", "scaled", "wrong-mask")
PROMPTS = (12, 24)
DRAWS = 200
SEED = 20261129
NOBODY = Asked(rid="", prompt_tokens=0)
"""Whose answers are only looked at for what they say of their texts."""


def take(kernel: str, dtype: str, plan: Plan) -> Sample:
    """Ask ``plan`` of an engine that serves ``kernel``: off, on, or on with a fault."""
    target, drafter, tokenizer = load_pair(dtype=DTYPES[dtype])
    assert tokenizer is not None
    mine = ours(None) if kernel in ("off", "on") else plant(kernel, ours(None))
    engine = Engine(target, drafter, config=EngineConfig(verify="off" if kernel == "off" else "on"), mine=mine)

    def ask(text: str | list[int], tokens: int) -> int:
        ids = tokenizer.encode(text) if isinstance(text, str) else text
        params = SamplingParams(max_new_tokens=tokens, stop_token_ids=())
        return engine.submit(ids, params, top_logprobs=plan.top_logprobs)

    texts = [(prompt.name, ask(prompt.input, plan.new_tokens)) for prompt in plan.prompts]
    places = [
        (prompt.name, offset, ask(prompt.upto(offset), plan.probe_tokens))
        for prompt in plan.prompts
        for offset in ((i + 1) * len(prompt.forced) // (plan.probes + 1) for i in range(plan.probes))
    ]
    while engine.busy:
        engine.step()
    return Sample(
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        url="engine",
        mode="off" if kernel == "off" else "on",
        plan=plan,
        generations=[_generation(name, engine.result(request)) for name, request in texts],
        probes=[_probe(name, offset, engine.result(request)) for name, offset, request in places],
        speed=[],
        failures=[],
    )


def _generation(name: str, result: Result) -> Generation:
    meta = answer(NOBODY, result, None, 0.0)["meta_info"]
    accepted = meta["spec_correct_drafts_histogram"]
    return Generation(prompt=name, positions=positions(meta), verify_steps=meta["spec_verify_ct"], accepted=accepted)


def _probe(name: str, offset: int, result: Result) -> Probe:
    first, *rest = positions(answer(NOBODY, result, None, 0.0)["meta_info"])
    return Probe(prompt=name, offset=offset, first=first.token, positions=rest)


def drawn(pair: tuple[Sample, Sample], chosen: list[int]) -> tuple[Sample, Sample]:
    """Both samples with the prompts ``chosen`` only, which may repeat: the copies get names of their own."""
    names = [pair[0].plan.prompts[index].name for index in chosen]
    plan = pair[0].plan.model_copy(
        update={"prompts": [pair[0].plan.prompts[i].model_copy(update={"name": f"{n}"}) for n, i in enumerate(chosen)]}
    )

    def one(sample: Sample) -> Sample:
        texts = {found.prompt: found for found in sample.generations}
        probes: dict[str, list[Probe]] = {}
        for found in sample.probes:
            probes.setdefault(found.prompt, []).append(found)
        return sample.model_copy(
            update={
                "plan": plan,
                "generations": [texts[name].model_copy(update={"prompt": f"{n}"}) for n, name in enumerate(names)],
                "probes": [
                    found.model_copy(update={"prompt": f"{n}"})
                    for n, name in enumerate(names)
                    for found in probes[name]
                ],
            }
        )

    return one(pair[0]), one(pair[1])


def remember_pairs() -> None:
    """Let the figures of one pair of positions be computed once: draws repeat the same pairs, and they are pure."""
    for name in ("divergence", "logprob_change", "disagreement"):
        setattr(statistics, name, _remembered(getattr(statistics, name)))


def _remembered(compute: Callable[..., object]) -> Callable[..., object]:
    known: dict[tuple[object, ...], object] = {}

    def call(pair: statistics.Pair, *rest: object) -> object:
        key = (id(pair.baseline), id(pair.candidate), *rest)
        if key not in known:
            known[key] = compute(pair, *rest)
        return known[key]

    return call


def records(folder: Path, dtype: str, limits: Limits) -> Iterator[Record]:
    """One record per kernel and number of prompts: in how many draws each gate closed."""
    files = {kernel: folder / f"{dtype}-{kernel}.json" for kernel in KERNELS}
    samples = {k: Sample.model_validate_json(file.read_text()) for k, file in files.items() if file.exists()}
    if len({sample.plan.model_dump_json() for sample in samples.values()}) != 1:
        raise ConfigError(f"{folder}: expected samples of one plan")
    for kernel in [kernel for kernel in samples if kernel != "off"]:
        pair = (samples["off"], samples[kernel])
        whole = {v.gate: v.figures for v in statistical("on", *pair, limits)}
        for prompts in PROMPTS:
            random = np.random.default_rng(SEED)
            closed: dict[str, int] = {"any statistic": 0}
            for _ in range(DRAWS):
                chosen = random.integers(0, len(pair[0].plan.prompts), prompts).tolist()
                found = drawn(pair, chosen)
                verdicts = statistical("on", *found, limits)
                closed["any statistic"] += not all(verdict.passed for verdict in verdicts)
                for verdict in [*verdicts, generation("on", *found, limits)]:
                    closed[verdict.gate] = closed.get(verdict.gate, 0) + (not verdict.passed)
            yield {
                "benchmark": "cutover-power",
                "impl": kernel,
                "case": {"dtype": dtype, "prompts": prompts, "drawn_from": len(pair[0].plan.prompts), "draws": DRAWS}
                | {"new_tokens": pair[0].plan.new_tokens, "probes": pair[0].plan.probes}
                | {"probe_tokens": pair[0].plan.probe_tokens, "limits": limits.model_dump()},
                "measures": {"closed": closed, "all_prompts": {g: _rounded(figures) for g, figures in whole.items()}},
            }


def _rounded(figures: dict[str, float | int | str | None]) -> dict[str, float | int | str | None]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}


def main() -> None:
    """Parse and do one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("measure", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts to measure")
    parser.add_argument("--kl", type=float, help="margin of KL and log-probability; default: that of the gates")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.do == "judge":
        remember_pairs()
        margins = {} if options.kl is None else {"kl": options.kl, "logprob": options.kl}
        for found in records(options.folder, options.dtype, Limits(**margins)):
            print(found["impl"], found["case"]["prompts"], found["measures"]["closed"], flush=True)
            if options.out is not None:
                append(options.out, {**found, **environment()})
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    plan = Plan.builtin(options.prompts, new_tokens=48, probes=3, speed_passes=0)
    for kernel in options.kernels:
        file = options.folder / f"{options.dtype}-{kernel}.json"
        if not file.exists():
            file.write_text(take(kernel, options.dtype, plan).model_dump_json())
            print(kernel, flush=True)


if __name__ == "__main__":
    main()
