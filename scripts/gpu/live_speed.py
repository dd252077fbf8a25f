"""Parts of the live run on the random 8-head model, NGRAM trees of 16, CUDA graphs: speed, and a million rows."""

from __future__ import annotations

import gzip
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live_models import LAYERS, VOCAB
from live_server import BY_KIND, NGRAM, Server, start, summary

POINTS = tuple((prefix, batch) for prefix in (130, 8192, 32768) for batch in (1, 8))
FLOORS = {(32768, 1): 6.0, (8192, 1): 2.5, (130, 1): 0.98}
OF_LIMIT = 0.9
"""Share of the Amdahl limit that must be reached."""
WINDOWS = 20
ROWS = 1_000_000
FLAGS = [*NGRAM, *BY_KIND["graph"], "--context-length", "40960", "--max-total-tokens", "330000"]


def speed(folder: Path, models: Path, kinds: list[str], startup: float) -> tuple[dict[str, Any], list[str]]:
    """Tokens per second, on against off, the mode switched live; the limit that the profiled share of attention sets.

    The prefix cache is on: windows of one point share their prefill. A second server runs SGLang's own ``triton``
    without the plugin, for what ``off`` costs.
    """
    with _server(folder, models, startup, stock=True) as (servers, failures):
        if failures:
            return {}, failures
        ours, stock = servers
        points = []
        for prefix, batch in POINTS:
            point = _point(ours, folder, prefix, batch)
            if prefix < 32768:
                point["off_over_stock"] = _ratio(
                    _windows(_prompts(prefix, batch), 10, {"stock": (stock, None), "off": (ours, "off")}),
                    "stock",
                    "off",
                )
            print(json.dumps({k: v for k, v in point.items() if k != "windows"}), flush=True)
            points.append(point)
            failures += _judge(point)
        return {"points": points, "log": ours.notes(), "state": ours.state()}, failures


def validate(folder: Path, models: Path, kinds: list[str], startup: float) -> tuple[dict[str, Any], list[str]]:
    """Windows in validate at every point until a million (node, head) rows are compared, and what validate costs."""
    with _server(folder, models, startup) as (servers, failures):
        if failures:
            return {}, failures
        (server,) = servers
        costs = []
        for prefix, batch in POINTS:
            windows = _windows(_prompts(prefix, batch), 3, {m: (server, m) for m in ("off", "validate")})
            costs.append({"prefix": prefix, "batch": batch, "validate_over_off": _ratio(windows, "off", "validate")})
            print(json.dumps(costs[-1]), flush=True)
        server.switch("validate")
        rounds, (one,) = 0, summary(server.state())
        while one["rows"] < ROWS:
            for prefix in (130, 8192, 32768):
                server.generate(_prompts(prefix, 8), 96)
            rounds += 1
            (one,) = summary(server.state())
            print(json.dumps({"rounds": rounds, "rows": one["rows"], "max_row_ulp": one["max_row_ulp"]}), flush=True)
        if one["mismatched_rows"] or one["max_row_ulp"] > 2 or one["within_1_ulp"] < 0.999 or one["left_to_parent"]:
            failures.append(f"validate: {one}")
        return {"costs": costs, "summary": one, "state": server.state(), "log": server.notes()}, failures


@contextmanager
def _server(
    folder: Path, models: Path, startup: float, stock: bool = False
) -> Iterator[tuple[list[Server], list[str]]]:
    target, share = models / "target", ["--mem-fraction-static", "0.7"]
    servers = [Server("random", target, 20000, folder, ["--attention-backend", "treeverify", *FLAGS, *share])]
    if stock:
        flags = ["--attention-backend", "triton", *FLAGS, *share]
        servers.append(Server("stock", target, 23000, folder, flags, SGLANG_PLUGINS="none"))
    try:
        yield servers, start(servers, startup)
    finally:
        for server in servers:
            server.stop()


def _length(prompts: list[list[int]]) -> int:
    """Tokens of one window: long enough to time its steps, shorter where a step of off takes long."""
    return 192 if len(prompts[0]) > 16384 else 256


def _prompts(prefix: int, batch: int) -> list[list[int]]:
    draw = random.Random(prefix)
    return [[draw.randrange(2, VOCAB) for _ in range(prefix)] for _ in range(batch)]


def _point(server: Server, folder: Path, prefix: int, batch: int) -> dict[str, Any]:
    prompts = _prompts(prefix, batch)
    sides = {mode: (server, mode) for mode in ("off", "on")}
    windows = _windows(prompts, WINDOWS, sides)
    kernels = {}
    for mode in sides:
        server.switch(mode)
        kernels[mode] = _profile(server, folder / f"profile_{prefix}_{batch}_{mode}", prompts)
    point: dict[str, Any] = {"prefix": prefix, "batch": batch, "ratio": _ratio(windows, "off", "on")}
    for mode in sides:
        point[mode] = {
            "tokens_per_second": statistics.median(one["tokens_per_second"] for one in windows[mode]),
            "step_ms": statistics.median(one["step_ms"] for one in windows[mode]),
            "accept": statistics.median(one["accept"] for one in windows[mode]),
        }
    point["step_ratio"] = point["off"]["step_ms"] / point["on"]["step_ms"]
    point |= _limit(point["off"]["step_ms"], kernels["off"], kernels["on"])
    return point | {"windows": windows}


def _limit(step_ms: float, off: dict[str, float], on: dict[str, float]) -> dict[str, Any]:
    """Amdahl: the step in off, with the baseline's attention exchanged for ours."""
    theirs = sum(ms for name, ms in off.items() if "_fwd_kernel" in name)
    ours = sum(ms for name, ms in on.items() if "tree_attention" in name)
    return {
        "attention_ms": {"off": theirs, "on": ours},
        "share_off": theirs / step_ms if step_ms else math.nan,
        "amdahl": step_ms / (step_ms - theirs + ours) if 0 < theirs < step_ms else math.nan,
        "kernels": {"off": dict(Counter(off).most_common(8)), "on": dict(Counter(on).most_common(8))},
    }


def _windows(
    prompts: list[list[int]], count: int, sides: dict[str, tuple[Server, str | None]]
) -> dict[str, list[dict[str, float]]]:
    """Alternate the sides, ``count`` windows each; every other round begins with the other one."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    tokens = _length(prompts)
    prefill = {}
    for name, (server, mode) in sides.items():  # fills the prefix cache, and NGRAM's with the texts of each side
        _set(server, mode)
        server.generate(prompts, tokens)
        prefill[name] = statistics.median(
            _timed(lambda server=server: server.generate(prompts, 1))[0] for _ in range(5)
        )
    for turn in range(count):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            server, mode = sides[name]
            _set(server, mode)
            seconds, answers = _timed(lambda server=server: server.generate(prompts, tokens))
            seconds -= prefill[name]
            steps = max(one["meta_info"].get("spec_verify_ct") or 1 for one in answers)
            found[name].append(
                {
                    "tokens_per_second": len(prompts) * (tokens - 1) / seconds,
                    "step_ms": seconds / steps * 1e3,
                    "accept": statistics.mean(one["meta_info"].get("spec_accept_length") or 0.0 for one in answers),
                }
            )
    return found


def _set(server: Server, mode: str | None) -> None:
    if mode is not None:
        server.switch(mode)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    answer = call()
    return time.perf_counter() - begin, answer


def _ratio(windows: dict[str, list[dict[str, float]]], base: str, other: str) -> dict[str, float]:
    """Tokens per second, ``other`` over ``base``: geometric mean of the pairs, with its 95% interval (normal)."""
    logs = [
        math.log(b["tokens_per_second"] / a["tokens_per_second"])
        for a, b in zip(windows[base], windows[other], strict=True)
    ]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = (math.exp(mean + sign * 1.96 * error) for sign in (-1, 1))
    return {"pairs": len(logs), "ratio": math.exp(mean), "low": low, "high": high}


def _judge(point: dict[str, Any]) -> list[str]:
    place, ratio = (point["prefix"], point["batch"]), point["ratio"]["ratio"]
    failures = []
    if ratio < FLOORS.get(place, 0.0):
        failures.append(f"{place}: {ratio:.2f}x, floor {FLOORS[place]}")
    if not point["step_ratio"] >= OF_LIMIT * point["amdahl"]:
        failures.append(f"{place}: steps {point['step_ratio']:.2f}x faster, Amdahl limit {point['amdahl']:.2f}")
    return failures


def _profile(server: Server, folder: Path, prompts: list[list[int]]) -> dict[str, float]:
    """Milliseconds per step of each GPU kernel, over steps in the middle of a text."""
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(server.generate, prompts, 1024 if len(prompts[0]) > 16384 else 3072)
        time.sleep(0.15)  # the prefill, of a prefix that is cached
        server.ask("/start_profile", {"output_dir": str(folder), "activities": ["GPU"], "num_steps": 8})
        text.result()
    until = time.time() + 30
    while not (traces := list(folder.rglob("*.gz"))) and time.time() < until:
        time.sleep(0.2)
    if not traces:
        raise RuntimeError(f"{server.name}: no trace in {folder}")
    time.sleep(1)
    return kernels_of(traces[0], LAYERS)


def kernels_of(trace: Path, layers: int) -> dict[str, float]:
    """Sum a trace's kernels by name, in milliseconds per step; a step has one attention call a layer."""
    with gzip.open(trace) as text:
        events = [event for event in json.load(text)["traceEvents"] if event.get("cat") == "kernel"]
    calls = sum(any(part in event["name"] for part in ("_fwd_kernel", "tree_attention_portable")) for event in events)
    total: Counter[str] = Counter()
    for event in events:
        total[event["name"][:120]] += event["dur"] / 1e3 / (calls / layers)
    return dict(total)
