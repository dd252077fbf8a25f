"""Parts of the live run on the random 8-head model, NGRAM trees of 16, CUDA graphs: speed, and a million rows."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from live_models import LAYERS, VOCAB
from live_part import Part
from live_server import BY_KIND, FA3, NGRAM, Server, has_fa3, running, summary
from live_windows import STEPS, Side, kernels_of, medians, prompts_of, ratio, rotate, seconds_of, trace, waited_ms

POINTS = ((8192, 1), (130, 1), (32768, 1), (32768, 8), (8192, 8), (130, 8))
"""(prefix, batch), those with a floor first."""
FLOORS = {(32768, 1): 6.0, (8192, 1): 2.5, (130, 1): 0.98}
OF_LIMIT = 0.9
"""Share of the limit that must be reached."""
ROWS = 1_000_000
MOST = 4096
"""Longest text of a window, in tokens."""
OFF_PAIRS = (("stock-a", "stock-b"), ("off-a", "off-b"), ("stock-a", "off-a"), ("stock-b", "off-b"))
PROFILES = 12.0
"""Seconds that the two profiles of a point take."""
FLAGS = [*NGRAM, *BY_KIND["graph"], "--context-length", "40960", "--max-total-tokens", "330000"]
SHARE = ["--mem-fraction-static", "0.7"]


def speed(part: Part) -> None:
    """Windows of off and on, switched live, of FA3's server and of SGLang's own without the plugin, all in turns.

    A floor is judged by the time of a step, that is by tokens per second at equal acceptance: the texts of two modes
    part at near-ties, and NGRAM drafts from what it has seen, so that acceptance is another in each. Tokens per second
    as they came and tokens per step are recorded beside it.
    """
    target = part.models / "target"
    ours = Server("random", target, 0, part.folder, ["--attention-backend", "treeverify", *FLAGS, *SHARE])
    stock = ["--attention-backend", "triton", *FLAGS, *SHARE]
    rivals = [Server("stock", target, 1, part.folder, stock, SGLANG_PLUGINS="none")]
    if has_fa3():
        rivals.append(Server("fa3", target, 2, part.folder, [*FA3, *FLAGS, *SHARE], SGLANG_PLUGINS="none"))
    else:
        part.failures.append("fa3: its library is not in the bundle")
    with running(part, [ours], rivals) as up:
        sides = {mode: Side(ours, mode) for mode in ("off", "on")} | {one.name: Side(one) for one in up}
        points: list[dict[str, Any]] = []
        for number, place in enumerate(POINTS):
            budget = part.left() / (len(POINTS) - number)
            if budget < PROFILES + 8:
                part.failures.append(f"not reached for want of time: {POINTS[number:]}")
                break
            points.append(_point(part, sides, place, budget))
            part.failures += _judge(points[-1])
            part.keep("points", points)
            print(json.dumps({k: v for k, v in points[-1].items() if k != "windows"}), flush=True)
        part.found["log"] = ours.notes()
        part.keep("state", ours.state())


def off(part: Part) -> None:
    """What `off` costs: two servers of SGLang's own without the plugin, two with it, in turns at 130 tokens.

    Each has cores of its own. What one of a pair differs from the other is the error of this comparison.
    """
    flags = [*FLAGS, "--mem-fraction-static", "0.2"]
    servers = []
    for slot, name in enumerate(("stock-a", "off-a", "stock-b", "off-b")):
        attention = "triton" if name.startswith("stock") else "treeverify"
        plugins = {"SGLANG_PLUGINS": "none"} if attention == "triton" else {}
        chosen = ["--attention-backend", attention, *flags]
        with _own_cores(slot, of=4):
            servers.append(Server(name, part.models / "target", slot, part.folder, chosen, **plugins))
    with running(part, servers):
        for batch in (1, 8):
            sides = {one.name: Side(one) for one in servers}
            windows = rotate(sides, prompts_of(130, batch, VOCAB), 0.4, MOST)
            pairs = {f"{other} over {base}": ratio(windows, base, other, "step_ms") for base, other in OFF_PAIRS}
            found = {"prefix": 130, "batch": batch, "sides": medians(windows), "steps": pairs}
            part.keep(f"batch_{batch}", found | {"windows": windows})
            print(json.dumps(found), flush=True)


@contextmanager
def _own_cores(number: int, of: int) -> Iterator[None]:
    """Processes that start meanwhile get every ``of``-th core of ours; all of them if there are fewer than ``of``."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number::of] if len(cores) >= of else cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def validate(part: Part) -> None:
    """Windows in validate at every point until a million (node, head) rows are compared, and what validate costs."""
    flags = ["--attention-backend", "treeverify", *FLAGS, *SHARE]
    server = Server("random", part.models / "target", 0, part.folder, flags)
    with running(part, [server]):
        costs: list[dict[str, Any]] = []
        for prefix, batch in POINTS:
            sides = {mode: Side(server, mode) for mode in ("off", "validate")}
            windows = rotate(sides, prompts_of(prefix, batch, VOCAB), 0.3, MOST, rounds=5)
            costs.append({"prefix": prefix, "batch": batch, "step_ratio": ratio(windows, "off", "validate", "step_ms")})
            part.keep("costs", costs)
            print(json.dumps(costs[-1]), flush=True)
        server.switch("validate")
        (one,) = summary(server.state())
        while one["rows"] < ROWS and part.left() > 5:
            for prefix in sorted({prefix for prefix, _ in POINTS}):
                server.generate(prompts_of(prefix, 8, VOCAB), 96)
            (one,) = summary(server.state())
            part.keep("summary", one)
            print(json.dumps({"rows": one["rows"], "max_row_ulp": one["max_row_ulp"]}), flush=True)
        if one["rows"] < ROWS or one["mismatched_rows"] or one["left_to_parent"]:
            part.failures.append(f"validate: {one}")
        if one["max_row_ulp"] > 2 or one["within_1_ulp"] < 0.999:
            part.failures.append(f"validate: beyond 2 ULP, or below 99.9% within 1: {one}")
        part.found["log"] = server.notes()
        part.keep("state", server.state())


def _point(part: Part, sides: dict[str, Side], place: tuple[int, int], budget: float) -> dict[str, Any]:
    prefix, batch = place
    prompts = prompts_of(prefix, batch, VOCAB)
    used = {name: side for name, side in sides.items() if name != "stock" or prefix < 32768}
    windows = rotate(used, prompts, seconds_of(budget - PROFILES, len(used)), MOST)
    point: dict[str, Any] = {"prefix": prefix, "batch": batch, "sides": medians(windows)}
    pairs = [("off", "on"), *[(name, "on" if name == "fa3" else "off") for name in used if name in ("fa3", "stock")]]
    for base, other in pairs:
        point[f"{other}_over_{base}"] = {
            "steps": ratio(windows, base, other, "step_ms"),
            "tokens": ratio(windows, base, other),
        }
    point["reachable"] = math.nan
    try:
        off, on = (
            trace(sides[mode], part.folder / f"trace_{prefix}_{batch}_{mode}", prompts, 8, MOST)
            for mode in ("off", "on")
        )
        point |= limit(point["sides"]["off"]["step_ms"], off, on)
    except RuntimeError as error:  # the windows are worth keeping
        part.failures.append(f"{place}: no profile: {error}")
    return point | {"windows": windows}


def limit(step_ms: float, off: list[dict[str, Any]], on: list[dict[str, Any]]) -> dict[str, Any]:
    """Amdahl: the step in off, with the baseline's attention exchanged for ours; from profiles of both modes.

    ``amdahl`` takes all of the attention to be on the critical path. It is not where the host works meanwhile: no
    kernel saves more of a step than the time that the host waits for the GPU. ``reachable`` is the limit with that.
    ``busy_ms`` is the GPU's time per step.
    """
    kernels = {"off": kernels_of(off, LAYERS), "on": kernels_of(on, LAYERS)}
    theirs = sum(ms for name, ms in kernels["off"].items() if "_fwd_kernel" in name)
    ours = sum(ms for name, ms in kernels["on"].items() if "tree_attention" in name)
    waited = waited_ms(off, LAYERS)
    return {
        "attention_ms": {"off": theirs, "on": ours},
        "busy_ms": {mode: sum(some.values()) for mode, some in kernels.items()},
        "waited_ms": {"off": waited, "on": waited_ms(on, LAYERS)},
        "share_off": theirs / step_ms,
        "amdahl": step_ms / (step_ms - theirs + ours) if 0 < theirs < step_ms else math.nan,
        "reachable": step_ms / (step_ms - min(theirs - ours, waited)) if 0 < theirs < step_ms else math.nan,
        "kernels": {mode: dict(Counter(some).most_common(8)) for mode, some in kernels.items()},
    }


def _judge(point: dict[str, Any]) -> list[str]:
    place, found = (point["prefix"], point["batch"]), point["on_over_off"]["steps"]["ratio"]
    failures = []
    if found < FLOORS.get(place, 0.0):
        failures.append(f"{place}: steps {found:.2f}x faster, floor {FLOORS[place]}")
    if not found >= OF_LIMIT * point["reachable"]:
        failures.append(f"{place}: steps {found:.2f}x faster, limit {point['reachable']:.2f}")
    failures += [
        f"{place} {name}: windows of {side['fewest_steps']} steps, expected at least {STEPS}"
        for name, side in point["sides"].items()
        if side["fewest_steps"] < STEPS
    ]
    return failures
