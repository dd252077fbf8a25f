"""Parts of the DDTREE run that measure time: windows of every way to decode, and the gap between verify and draft."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ddtree_servers import AT_ONCE, PACKAGED, Choice, Pair, config, held, servers_of
from live_models import VOCAB
from live_part import Part
from live_server import has_fa3, running
from live_windows import ROUNDS, STEPS, Side, Windows, is_ours, medians, prompts_of, ratio, rotate, seconds_of, trace

TREES = ("ddtree9", "ddtree17", "ddtree33", "ddtree65")
"""Budgets of 8, 16, 32 and 64 nodes beside the root."""
AUTO = "auto65"
AUTO_FLOOR = 0.97
"""Of the tokens per second of the best of plain decoding, the chain and the trees."""
AUTO_START = 70
"""Seconds for its server to come up."""
LEAST = 0.35
"""Seconds of a window with what is around it."""
PREFIX = 1024
LONG = 32768
GAP_STEPS = 200
GAP_MS = {1: 0.3, AT_ONCE: 0.6}
"""What is aimed at, by batch, with a budget of 32."""

Event = dict[str, Any]


def speed(part: Part, choice: Choice) -> None:
    """Held-out text of 1k tokens on the packaged model: prompts joined, since a held-out text is shorter."""
    pair = replace(PACKAGED, sizes=("--context-length", "4096", "--max-total-tokens", "70000"))
    text = [token for ids in held() for token in ids]
    prompts = [text[n * PREFIX : (n + 1) * PREFIX] for n in range(AT_ONCE)]
    _windows(part, pair, prompts, 2900, choice, same=True)


def speed32k(part: Part, choice: Choice) -> None:
    """Random tokens on the random model."""
    sizes = ("--context-length", "40960", "--max-total-tokens", "620000")
    pair = Pair(part.models / "target", part.models / "dflash", sizes)
    _windows(part, pair, prompts_of(LONG, AT_ONCE, VOCAB), 2048, choice)


def _windows(part: Part, pair: Pair, prompts: list[list[int]], most: int, choice: Choice, same: bool = False) -> None:
    """Every way in turns, at each batch; ratios to plain and to the chain on our kernel; widths by cost to the best.

    The server that measures costs at its start comes up when the others are idle.
    """
    wanted, batches = choice.sides or ("plain", "dflash-on", *TREES, "dflash-fa3"), choice.batches
    servers = servers_of(part, [side for side in wanted if side != "dflash-fa3" or has_fa3()], pair)
    if len(servers) < len(wanted):
        part.failures.append("fa3: its library is not in the bundle")
    rivals = [server for name, server in servers.items() if name == "dflash-fa3"]
    with ExitStack() as stack:
        needed = [server for server in servers.values() if server not in rivals]
        up = stack.enter_context(running(part, needed, rivals))
        sides = {name: Side(server) for name, server in servers.items() if server not in rivals or server in up}
        if part.left() > AUTO_START + len(batches) * ROUNDS * (len(sides) + 1) * LEAST:
            auto = servers_of(part, [AUTO], pair, slot=len(servers))[AUTO]
            if stack.enter_context(running(part, [], [auto])):
                sides[AUTO] = Side(auto)
                part.keep("notes_auto", auto.notes())
        else:
            part.failures.append(f"{AUTO} not started for want of time: {part.left():.0f} s are left")
        points: list[dict[str, Any]] = []
        for number, batch in enumerate(batches):
            budget = part.left() / (len(batches) - number)
            if budget < ROUNDS * len(sides) * LEAST:
                part.failures.append(f"not reached for want of time: batches {batches[number:]}")
                break
            windows = rotate(sides, prompts[:batch], seconds_of(budget * 0.85, len(sides)), most, same=same)
            points.append({"prefix": len(prompts[0]), "batch": batch} | _table(windows) | {"windows": windows})
            part.keep("points", points)
            trees = (name for name in sides if name in (*TREES, AUTO))
            part.keep("ddtree", {name: sides[name].server.state("ddtree") for name in trees})
            print(json.dumps({k: v for k, v in points[-1].items() if k != "windows"}), flush=True)
            part.failures += judge_auto(batch, points[-1])
            part.failures += [
                f"batch {batch} {name}: windows of {side['fewest_steps']} steps, expected at least {STEPS}"
                for name, side in points[-1]["sides"].items()
                if side["fewest_steps"] < STEPS
            ]


def _table(windows: Windows) -> dict[str, Any]:
    """Medians; tokens per second of each way over plain and the chain, of ``AUTO`` over the best; trees that lose."""
    bases = [base for base in ("plain", "dflash-on") if base in windows]
    over = {base: {way: ratio(windows, base, way) for way in windows if way != base} for base in bases}
    lose = [way for way in TREES if any(found[way]["high"] < 1 for found in over.values() if way in found)]
    found = {"sides": medians(windows), "tokens_over": over, "trees_that_lose": lose}
    if AUTO in windows:
        ways = [way for way in windows if way not in (AUTO, "dflash-fa3")]
        best = max(ways, key=lambda way: found["sides"][way]["tokens_per_second"])
        found["auto_over_best"] = {"best": best, "aim": AUTO_FLOOR} | ratio(windows, best, AUTO)
    return found


def judge_auto(batch: int, point: dict[str, Any]) -> list[str]:
    """A failure unless the whole interval of ``auto_over_best`` is at or above the floor."""
    found = point.get("auto_over_best")
    if found is None:
        return [f"batch {batch}: {AUTO} is not there"]
    if found["low"] >= found["aim"]:
        return []
    interval = f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
    return [f"batch {batch}: {AUTO} over {found['best']}: {interval}, aim {found['aim']}"]


def gap(part: Part, choice: Choice) -> None:
    """200 steps of DDTREE (budget 32) and of the chain, profiled at batches of 1 and 16."""
    servers = servers_of(part, ["dflash-on", "ddtree33"])
    layers = config(PACKAGED.target)["num_hidden_layers"]
    with running(part, list(servers.values())):
        for batch in GAP_MS:
            prompts = [ids[:32] for ids in held()[:batch]]
            waits = {}
            for name, server in servers.items():
                trace(Side(server), part.folder / f"first_{name}_{batch}", prompts, 4, 3900)  # loads the profiler
                events = trace(Side(server), part.folder / f"trace_{name}_{batch}", prompts, GAP_STEPS, 3900)
                waits[name] = waits_of(events, layers)
                part.keep(f"waits_{name}_{batch}", waits[name])
                if name == "ddtree33":
                    found = gaps(events)
                    part.keep(f"gap_{batch}", found | {"aim_ms": GAP_MS[batch]})
                    print(json.dumps({"batch": batch} | found), flush=True)
                    if not found["median_ms"] <= GAP_MS[batch]:
                        part.failures.append(f"gap at {batch}: {found['median_ms']:.3f} ms, aim {GAP_MS[batch]}")
            for what, count in waits["ddtree33"]["per_step"].items():
                chain = waits["dflash-on"]["per_step"].get(what, 0.0)
                if count > chain + 0.1:  # 200 steps, of which the first and the last may be cut
                    part.failures.append(f"batch {batch}: {what}: {count:.2f} a step, DFLASH {chain:.2f}")


def gaps(events: Sequence[Event]) -> dict[str, Any]:
    """Milliseconds from the end of each verify graph to the start of the next draft graph, and how much of it is busy.

    Kernels of one CUDA graph share the correlation id of its launch. A graph with our attention and without
    ``tree_build`` is a verify; one with ``tree_build`` is a draft. Raises ``RuntimeError`` where no pair is found.
    """
    gpu = sorted((one for one in events if one.get("cat") in GPU), key=lambda one: one["ts"])
    launches: dict[int, list[Event]] = defaultdict(list)
    for one in gpu:
        launches[one["args"].get("correlation", -1)].append(one)
    verifies, drafts = [], []
    for some in launches.values():
        names = " ".join(one["name"] for one in some)
        if "tree_build" in names:
            drafts.append(min(one["ts"] for one in some))
        elif any(is_ours(one["name"]) for one in some):
            verifies.append(max(one["ts"] + one["dur"] for one in some))
    found, busy = [], []
    for end in sorted(verifies):
        begin = min((ts for ts in drafts if ts > end), default=None)
        if begin is not None:
            found.append((begin - end) / 1e3)
            busy.append(sum(one["dur"] for one in gpu if end <= one["ts"] < begin) / 1e3)
    if not found:
        raise RuntimeError(f"gap: no verify and draft graphs: {len(verifies)} verifies, {len(drafts)} drafts")
    ranked = sorted(found)
    return {
        "steps": len(found),
        "median_ms": statistics.median(found),
        "p90_ms": ranked[int(0.9 * (len(ranked) - 1))],
        "busy_median_ms": statistics.median(busy),
    }


GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def waits_of(events: Sequence[Event], layers: int) -> dict[str, Any]:
    """Calls per step that wait for the device, by name, and copies to pageable memory, which wait too."""
    steps = sum(one.get("cat") == "kernel" and is_ours(one["name"]) for one in events) / layers
    if steps < 1:
        raise RuntimeError("trace: no verify step of our attention")
    waits = Counter(
        one["name"] for one in events if one.get("cat") == "cuda_runtime" and "Synchronize" in one.get("name", "")
    )
    waits["copies to pageable memory"] = sum(
        one.get("cat") == "gpu_memcpy" and "DtoH" in one["name"] and "Pageable" in one["name"] for one in events
    )
    return {"steps": steps, "per_step": {name: count / steps for name, count in waits.items()}}
