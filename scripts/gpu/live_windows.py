"""Alternating windows of live servers, ratios of what they took with 95% intervals, and profiles of decode steps."""

from __future__ import annotations

import gzip
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live_server import Server

ROUNDS = 20
STEPS = 12
"""Fewest steps of a window."""
SHORTEST, LONGEST = 0.3, 1.0
"""Seconds of a window."""
STUDENT = {4: 2.776, 19: 2.093}
"""95% of Student's t lie within, by degrees of freedom."""

Windows = dict[str, list[dict[str, float]]]


@dataclass(frozen=True)
class Side:
    """A server, and the mode that it is switched to before each of its windows (None: it has only one)."""

    server: Server
    mode: str | None = None

    def ready(self) -> None:
        """Switch the mode."""
        if self.mode is not None:
            self.server.switch(self.mode)


def prompts_of(prefix: int, batch: int, vocabulary: int) -> list[list[int]]:
    """Random prompts of ``prefix`` tokens, the same ones in every run."""
    draw = random.Random(prefix)
    return [[draw.randrange(2, vocabulary) for _ in range(prefix)] for _ in range(batch)]


def window(side: Side, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Time one text per prompt, less a request for one token just before: prefill and a request's own cost.

    ``steps`` are those of the request that took most; without speculation a step is a token.
    """
    before, _ = _timed(lambda: side.server.generate(prompts, 1))
    whole, answers = _timed(lambda: side.server.generate(prompts, tokens))
    steps = max(one["meta_info"].get("spec_verify_ct") or tokens - 1 for one in answers)
    seconds = max(1e-6, whole - before)
    return {
        "seconds": seconds,
        "prefill_s": before,
        "steps": steps,
        "step_ms": seconds / steps * 1e3,
        "tokens_per_second": len(prompts) * (tokens - 1) / seconds,
        "tokens_per_step": (tokens - 1)
        / statistics.mean(one["meta_info"].get("spec_verify_ct") or tokens - 1 for one in answers),
    }


def length(one: dict[str, float], seconds: float, most: int) -> int:
    """Tokens of a window of about ``seconds`` that should hold half as many steps again as ``STEPS``; at most ``most``.

    ``one`` is the window before it: acceptance changes while prefix cache and NGRAM's memory fill.
    """
    steps = max(1.5 * STEPS, seconds * 1e3 / one["step_ms"])
    return max(16, min(most, math.ceil(steps * one["tokens_per_step"])))


def seconds_of(budget: float, sides: int) -> float:
    """How long a window may be so that ``ROUNDS`` of each side fit in ``budget``; each has 0.2 s around it."""
    return min(LONGEST, max(SHORTEST, budget / (ROUNDS * sides) - 0.2))


def rotate(
    sides: dict[str, Side], prompts: list[list[int]], seconds: float, most: int, rounds: int = 0, same: bool = False
) -> Windows:
    """Windows of every side in turns, ``ROUNDS`` if not told; every other round in the opposite order.

    ``same``: all windows are as many tokens, those of the slowest side: every side then writes the same text each time,
    and what differs from window to window is not the text.
    """
    tokens = {}
    for name, side in sides.items():
        side.ready()
        side.server.generate(prompts, min(most, 64))
        tokens[name] = min(most, 64)
        for _ in range(2):
            tokens[name] = length(window(side, prompts, tokens[name]), seconds, most)
    if same:
        tokens = dict.fromkeys(sides, min(tokens.values()))
    found: Windows = {name: [] for name in sides}
    for turn in range(rounds or ROUNDS):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            sides[name].ready()
            found[name].append(window(sides[name], prompts, tokens[name]))
            if not same:
                tokens[name] = length(found[name][-1], seconds, most)
    return found


def medians(windows: Windows) -> dict[str, dict[str, float]]:
    """Median of each quantity by side, and the fewest steps that a window held."""
    found = {}
    for name, rows in windows.items():
        found[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        found[name]["fewest_steps"] = min(row["steps"] for row in rows)
    return found


def ratio(windows: Windows, base: str, other: str, key: str = "tokens_per_second") -> dict[str, float]:
    """``other`` over ``base`` (of ``step_ms``: base over other, so that more is faster): geometric mean of the pairs.

    With its 95% interval, by Student's t of the logarithms.
    """
    sign = -1 if key == "step_ms" else 1
    logs = [sign * math.log(b[key] / a[key]) for a, b in zip(windows[base], windows[other], strict=True)]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = error * STUDENT[len(logs) - 1]
    low, high = math.exp(mean - reach), math.exp(mean + reach)
    return {"pairs": len(logs), "ratio": math.exp(mean), "low": low, "high": high}


def trace(side: Side, folder: Path, prompts: list[list[int]], steps: int, most: int) -> list[dict[str, Any]]:
    """Events of the profiler's trace over ``steps`` decode steps in the middle of a text, those of rank 0."""
    folder.mkdir(parents=True)
    side.ready()
    side.server.generate(prompts, min(most, 64))  # what the first text compiles is no part of a step
    known = window(side, prompts, min(most, 64))
    around = 1.5e3 / known["step_ms"]  # until the profiler has started, and a reserve
    tokens = min(most, math.ceil((steps + around) * max(known["tokens_per_step"], 2) * 2))
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(side.server.generate, prompts, tokens)
        time.sleep(0.1 + 2 * known["prefill_s"])
        side.server.ask("/start_profile", {"output_dir": str(folder), "activities": ["GPU"], "num_steps": steps})
        text.result()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for path in folder.rglob("*TP-0*.gz"):
            try:
                with gzip.open(path) as file:
                    events: list[dict[str, Any]] = json.load(file)["traceEvents"]
            except (EOFError, ValueError, OSError):
                continue  # still being written
            return events
        time.sleep(0.2)
    raise RuntimeError(f"{side.server.name}: no trace in {folder}; the text of {tokens} tokens may have been too short")


def kernels_of(events: Sequence[dict[str, Any]], layers: int) -> dict[str, float]:
    """Milliseconds per step of each kernel, by name; a step has one attention call a layer."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    calls = sum(is_attention(event["name"]) for event in kernels)
    if calls < layers:
        raise RuntimeError(f"trace: expected attention kernels of {layers} layers, got {calls} calls")
    total: Counter[str] = Counter()
    for event in kernels:
        total[event["name"][:120]] += event["dur"] / 1e3 / (calls / layers)
    return dict(total)


def waited_ms(events: Sequence[dict[str, Any]], layers: int) -> float:
    """Milliseconds per step that calls of the host took which wait for the GPU: synchronising ones, and copies.

    A profiled host is slower than another and waits less, so this is a lower bound of what it waits unprofiled.
    """
    steps = sum(event.get("cat") == "kernel" and is_attention(event["name"]) for event in events) / layers
    calls = [event for event in events if event.get("cat") == "cuda_runtime"]
    waits = sum(event["dur"] for event in calls if "Synchronize" in event["name"] or "Memcpy" in event["name"])
    return float(waits / 1e3 / steps)


def is_attention(kernel: str) -> bool:
    """Whether it is launched once a layer: Triton's extend kernel, or ours before its merge."""
    return "_fwd_kernel" in kernel or is_ours(kernel)


def is_ours(kernel: str) -> bool:
    """Whether it is our attention, without its merge."""
    return "tree_attention" in kernel and "merge" not in kernel


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    answer = call()
    return time.perf_counter() - begin, answer
