"""Part of the DDTREE run that looks at the host: where its time goes in a step, beside plain decoding's.

A plugin of SGLang's times the scheduler's decode steps and profiles as many more: by function, this package's and
SGLang's. A profiled host is slower: its shares say something, its sums do not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ddtree_parts import against
from ddtree_servers import AT_ONCE, Choice, held, servers_of, starts
from live_part import Part
from live_server import Server, plant, running

STEPS = 150
"""Timed, and after them profiled; ``SKIPPED`` come first."""
SKIPPED = 20
TURNS, DRAWN = 12, 16
"""Batches of texts that are drawn, and their tokens."""
PROFILE = '''
import cProfile
import json
import os
import pstats
import statistics
import time
from pathlib import Path

from sglang.srt.managers.scheduler import Scheduler

folder, skipped, steps = Path({folder!r}), {skipped}, {steps}


def rows(profile):
    """Calls a step, own and cumulative milliseconds a step by function, the dearest first."""
    found = []
    for (file, line, name), (_, calls, own, whole, _) in pstats.Stats(profile).stats.items():
        where = f"{{'/'.join(Path(file).parts[-2:])}}:{{line}} {{name}}"
        found.append([where, *(round(value / steps, 4) for value in (calls, 1e3 * own, 1e3 * whole))])
    return sorted(found, key=lambda row: -row[3])[:160]


def timed(stock):
    state = {{"step": 0, "times": [], "profile": None}}

    def run_batch(self, batch, *arguments, **options):
        if batch.forward_mode.is_extend():
            if state["profile"] is not None:
                state["profile"].disable()
            state.update(step=0, times=[], profile=None)
        else:
            state["step"] += 1
            if state["step"] >= skipped:
                state["times"].append(time.perf_counter())
            if state["step"] == skipped + steps:
                state["profile"] = cProfile.Profile()
                state["profile"].enable()
            if state["step"] == skipped + 2 * steps and state["profile"] is not None:
                state["profile"].disable()
                times = state["times"][: steps + 1]
                between = [1e3 * (b - a) for a, b in zip(times, times[1:])]
                known = {{"median_ms": statistics.median(between), "mean_ms": statistics.mean(between)}}
                known["functions"] = rows(state["profile"])
                (folder / f"host-{{len(batch.reqs)}}.json").write_text(json.dumps(known))
        return stock(self, batch, *arguments, **options)

    return run_batch


def forced(stock, width):
    def plan(self, *arguments):
        found = stock(self, *arguments)
        return found._replace(width=width, kind=found.kind._replace(rung=self.ladder.index(width)))

    return plan


def activate():
    Scheduler.run_batch = timed(Scheduler.run_batch)
    if "FORCED_WIDTH" in os.environ:
        from treeverify.integrations.sglang.ddtree.choice import Choice

        Choice.plan = forced(Choice.plan, int(os.environ["FORCED_WIDTH"]))
'''
SIDES = {"plain": {}, "ddtree65": {}, "auto65": {"KDTREE_LADDER": "1,65", "FORCED_WIDTH": "1"}}
"""Plain decoding, a tree, and widths by cost held to plain steps."""


def host(part: Part, choice: Choice) -> None:
    """Milliseconds of the scheduler's steps at batches of 1 and 16, and their functions; the texts are plain's."""
    servers = {}
    for number, (name, settings) in enumerate(SIDES.items()):
        folder = part.folder / name
        plugin = plant(folder, "host_profile", PROFILE.format(folder=str(folder), skipped=SKIPPED, steps=STEPS))
        path = f"{plugin}:{os.environ.get('PYTHONPATH', '')}"
        servers |= servers_of(part, [name], slot=number, PYTHONPATH=path, **settings)
    with running(part, list(servers.values())):
        for name, server in servers.items():
            for batch in (1, AT_ONCE):
                prompts = [ids[:32] for ids in held()[:batch]]
                server.generate(prompts, 2600)
                found = json.loads(Path(part.folder / name / f"host-{batch}.json").read_text())
                part.keep(f"{name}_{batch}", found)
                print(json.dumps({"side": name, "batch": batch, "median_ms": found["median_ms"]}), flush=True)
        part.keep("texts", against(part, servers, starts(min(choice.prompts, 32)), choice.new, AT_ONCE))
        part.keep("ddtree", {name: servers[name].state("ddtree") for name in SIDES if name != "plain"})
        part.keep("drawn", drawn(part, servers["ddtree65"], servers["auto65"]))


def drawn(part: Part, tree: Server, runs: Server) -> dict[str, int]:
    """Texts at temperature 1 with seeds, which a tree and plain steps draw with the same numbers at each position.

    The first token is drawn by SGLang's sampler, without a seed: texts are compared where it is the same. The logits of
    the two differ by rounding, and a draw with them where its number is that close to a boundary.
    """
    sampling = [{"temperature": 1.0, "sampling_seed": seed} for seed in range(AT_ONCE)]
    alike = same = 0
    for turn in range(TURNS):
        prompts = [ids[: 32 + turn] for ids in held()[:AT_ONCE]]
        texts = [
            [one["output_ids"] for one in server.generate(prompts, DRAWN, sampling=sampling)] for server in (tree, runs)
        ]
        for one, other in zip(*texts, strict=True):
            alike += one[0] == other[0]
            same += one == other
    if alike < TURNS or same < alike / 2:
        part.failures.append(f"drawn: {same} texts of {alike} with the same first token agree, expected half of them")
    return {"texts": TURNS * AT_ONCE, "same_first_token": alike, "same_text": same}
