"""The attention benchmark: every point x every implementation, interleaved with the machine's ceilings, into records.

For each point: make inputs, let each implementation capture a CUDA graph of calls over rotated KV sets, replay it into
a poisoned output and compare that with float64, then time all graphs and the ceilings in turn, round after round. An
implementation that is missing, refuses a point or gives a wrong result leaves a record with the reason.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from treeverify.bench import record, rivals
from treeverify.bench.attention_types import WRONG, DeviceLostError, Entry, Options
from treeverify.bench.ceilings import (
    COPY,
    MATMUL,
    MMA_SYNC,
    UNITS,
    Ceiling,
    Rates,
    copy_ceiling,
    matmul_ceiling,
    mma_sync_ceiling,
)
from treeverify.bench.check import call_order, error_of_replay, reference
from treeverify.bench.rivals import Implementation, Missing
from treeverify.bench.timing import GraphReplay, Replay, ReplayError, interleave, make_replay, median
from treeverify.bench.workloads import (
    Indices,
    Point,
    Workload,
    load_points,
    make_pool,
    make_workload,
    parse_point,
    pool_slots,
)
from treeverify.errors import BuildError

NOT_RUN = "not run"
"""How the reason of a point begins that the time budget left out."""


@dataclass
class _Bench:
    """State of a run."""

    options: Options
    device: torch.device
    environment: record.Record
    loaded: list[Implementation | Missing]
    ceilings: list[Ceiling] = field(default_factory=list)
    missing_ceiling: str | None = None
    records: list[record.Record] = field(default_factory=list)

    def write(self, benchmark: str, impl: str, case: dict[str, object], **fields: object) -> record.Record:
        entry = {"benchmark": benchmark, "impl": impl, "case": case, **fields, **self.environment}
        record.append(self.options.output, entry)
        self.records.append(entry)
        return entry


def run_attention_bench(points: Sequence[Point], options: Options) -> list[record.Record]:
    """Measure every point with every implementation; append to ``options.output`` point by point; return the records.

    Raises ``ConfigError`` for an unknown implementation and ``DeviceLostError``, after a record, for one that breaks
    the CUDA context; nothing for one that is missing or fails otherwise.
    """
    device = torch.device(options.device)
    loaded = [rivals.load(name) for name in options.implementations]
    bench = _Bench(options, device, record.environment(commit=options.commit), loaded)
    for implementation in loaded:
        if isinstance(implementation, Missing):
            options.say(f"missing: {implementation.name}: {implementation.reason}")
    bench.ceilings = [copy_ceiling(device), matmul_ceiling(device)]
    try:
        bench.ceilings.append(mma_sync_ceiling(device))
    except (BuildError, OSError) as error:
        bench.missing_ceiling = str(error)
        options.say(f"missing: {error}")
    begin = time.perf_counter()
    pool = make_pool(pool_slots(points, options.max_sets), device, options.seed)
    for number, point in enumerate(points):
        spent = time.perf_counter() - begin
        if spent > options.seconds:
            _skip_point(bench, point, f"{NOT_RUN}: the time budget of {options.seconds:g} s was spent")
            continue
        try:
            _run_point(bench, point, pool)
        except DeviceLostError as lost:
            _leave_out(bench, lost, points[number + 1 :])
            raise
        options.say(f"{point}: {time.perf_counter() - begin - spent:.1f} s, {spent:.0f} s before")
    return bench.records


def _run_point(bench: _Bench, point: Point, pool: torch.Tensor) -> None:
    entries: list[Entry] = []
    wanted = [item for item in bench.loaded if isinstance(item, Implementation)]
    layouts: list[Indices] = ["scatter", "contig", "page64"]
    for indices in layouts:
        users = [item for item in wanted if indices in item.indices]
        if users:
            work = make_workload(point, pool, indices, bench.options.seed, bench.options.max_sets)
            entries += _prepare_layout(bench, work, users)
    runs = _timed_rounds(bench, point, entries)
    rates = _write_ceilings(bench, point, runs)
    missing = [item for item in bench.loaded if isinstance(item, Missing)]
    entries += [Entry(item.name, "scatter", True, reason=item.reason) for item in missing]
    for entry in sorted(entries, key=lambda entry: bench.options.implementations.index(entry.implementation)):
        _write_entry(bench, point, entry, runs.get(entry.key, []), rates)
        if isinstance(entry.replay, GraphReplay):
            entry.replay.close()


def _timed_rounds(bench: _Bench, point: Point, entries: Sequence[Entry]) -> dict[str, list[float]]:
    """Time every replay; one that fails gets that as its reason, and the rounds begin again without it."""
    while True:
        replays: dict[str, Replay] = {entry.key: entry.replay for entry in entries if entry.replay is not None}
        replays |= {ceiling.name: ceiling.replay for ceiling in bench.ceilings}
        try:
            return interleave(replays, bench.options.rounds)
        except ReplayError as failure:
            failed = [entry for entry in entries if entry.key == failure.name]
            if not failed:
                raise  # a ceiling: nothing can be said without it
            failed[0].reason, failed[0].replay = str(failure)[:300], None
            _check_context(bench, point, failed[0])


def _prepare_layout(bench: _Bench, work: Workload, users: Sequence[Implementation]) -> list[Entry]:
    """Capture every implementation on ``work``, replay it, wait for it and check it, one after the other."""
    references: dict[tuple[bool, int], torch.Tensor] = {}
    entries = []
    for item in users:
        entry = Entry(item.name, work.indices, item.tree)
        try:
            calls = item.prepare(work)
            order = call_order(calls, bench.device)
            entry.replay = make_replay([calls[number] for number in order], bench.device)
            key = (item.tree, order[-1])
            if key not in references:
                references[key] = reference(work, *key)
            entry.error = error_of_replay(entry.replay, calls[order[-1]], references[key])
            if not entry.error <= WRONG:
                entry.reason = f"wrong result: relative error {entry.error:.2e} against float64"
        except Exception as failure:  # noqa: BLE001  (a rival may raise anything; the record shows it)
            entry.reason = f"{type(failure).__name__}: {failure}"[:300]
            _check_context(bench, work.point, entry)
        if entry.reason is not None:
            entry.replay = None
        entries.append(entry)
    return entries


def _check_context(bench: _Bench, point: Point, entry: Entry) -> None:
    """Raise ``DeviceLostError`` if the failure that ``entry`` holds took the CUDA context with it."""
    if bench.device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        _write_entry(bench, point, entry, [], None)
        raise DeviceLostError(entry.implementation, point, str(entry.reason)) from error


def _write_ceilings(bench: _Bench, point: Point, runs: dict[str, list[float]]) -> Rates:
    medians: dict[str, float] = {}
    case: dict[str, object] = {"point": str(point)}
    for ceiling in bench.ceilings:
        rates = [ceiling.rate(us) for us in runs[ceiling.name]]
        medians[ceiling.name] = median(rates)
        fields = {"rate": medians[ceiling.name], "rate_runs": rates, "unit": UNITS[ceiling.name], "reason": None}
        bench.write("ceiling", ceiling.name, case, **fields)
    if bench.missing_ceiling:
        fields = {"rate": None, "rate_runs": [], "unit": UNITS[MMA_SYNC], "reason": bench.missing_ceiling}
        bench.write("ceiling", MMA_SYNC, case, **fields)
    return Rates(medians[COPY], medians[MATMUL], medians.get(MMA_SYNC))


def _case(point: Point, indices: str, tree: bool) -> dict[str, object]:
    mask = "tree" if tree else "causal"
    case = {"bs": point.bs, "nodes": point.nodes, "heads": point.heads, "prefix": point.prefix}
    return {**case, "indices": indices, "mask": mask}


def _write_entry(bench: _Bench, point: Point, entry: Entry, runs: list[float], rates: Rates | None) -> None:
    floor, bound = (None, "") if rates is None else rates.floor(point)
    us = round(median(runs), 3) if runs else None
    error = entry.error if entry.error is not None and math.isfinite(entry.error) else None
    written = bench.write(
        "attention",
        entry.implementation,
        _case(point, entry.indices, entry.tree),
        us=us,
        us_runs=[round(run, 3) for run in runs],
        floor_us=None if floor is None else round(floor, 3),
        bound=bound,
        ratio=round(us / floor, 3) if us is not None and floor is not None else None,
        error=error,
        reason=entry.reason,
        rates={} if rates is None else asdict(rates),
    )
    timing = f"{us:10.1f} us  {written['ratio']:7.2f} x floor  error {error:.2e}" if us else entry.reason
    bench.options.say(f"  {point!s:>18} {entry.key:34} {timing}")


def _skip_point(bench: _Bench, point: Point, reason: str) -> None:
    for item in bench.loaded:
        entry = Entry(item.name, "scatter", isinstance(item, Missing) or item.tree, reason=reason)
        _write_entry(bench, point, entry, [], None)


def _leave_out(bench: _Bench, lost: DeviceLostError, rest: Sequence[Point]) -> None:
    """Records of the implementation that broke the device, for the points at which it will not be tried again."""
    for item in bench.loaded:
        if item.name == lost.implementation and isinstance(item, Implementation):
            for point in rest:
                entry = Entry(item.name, item.indices[0], item.tree, reason=f"left out: {lost}"[:300])
                _write_entry(bench, point, entry, [], None)


ANCHORS, RECORDS = Path("benchmarks/anchors/h200-anchors.csv"), Path("benchmarks/results/attention.jsonl")


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    made = argparse.ArgumentParser(prog="treeverify bench attention", description=__doc__)
    made.add_argument("--points", default="", help="Comma-separated, such as 1/9/8/128k; default: all of --anchors.")
    made.add_argument("--anchors", type=Path, default=ANCHORS, help="File of the points.")
    made.add_argument("--implementations", default=",".join(rivals.NAMES), help="Ours and rivals.")
    made.add_argument("--output", type=Path, default=RECORDS, help="Append the records to this file.")
    made.add_argument("--seconds", type=float, default=200.0, help="No new point begins after this long.")
    made.add_argument("--rounds", type=int, default=5, help="Interleaved rounds of each point.")
    made.add_argument("--commit", default=None, help="Written into the records; default: ask git.")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the benchmark: ``python -m treeverify.bench.attention``."""
    chosen = parser().parse_args(arguments)
    texts = [text for text in chosen.points.split(",") if text]
    points = [parse_point(text) for text in texts] or load_points(chosen.anchors)
    options = Options(
        output=chosen.output,
        implementations=chosen.implementations.split(","),
        seconds=chosen.seconds,
        rounds=chosen.rounds,
        commit=chosen.commit,
    )
    begin = time.perf_counter()
    try:
        run_attention_bench(points, options)
    except DeviceLostError as lost:
        print(f"{lost}; starting again without it", flush=True)
        rest = [str(point) for point in points[points.index(lost.point) :]]
        names = [name for name in options.implementations if name != lost.implementation]
        again = {"points": rest, "implementations": names}
        kept = {
            "output": options.output,
            "seconds": round(options.seconds - (time.perf_counter() - begin), 1),
            "rounds": options.rounds,
            "commit": options.commit,
        }
        flags = [f"--{name}={','.join(values)}" for name, values in again.items()]
        flags += [f"--{name}={value}" for name, value in kept.items() if value is not None]
        os.execv(sys.executable, [sys.executable, "-m", "treeverify.bench.attention", *flags])


if __name__ == "__main__":
    main()
