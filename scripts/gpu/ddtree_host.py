"""Part of the DDTREE run that looks at the host: where its time goes in a step, beside plain decoding's.

A plugin of SGLang's times the scheduler's decode steps and profiles as many more: by function, this package's and
SGLang's. A profiled host is slower: its shares say something, its sums do not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ddtree_parts import against
from ddtree_servers import AT_ONCE, Choice, held, plain_runs, servers_of, starts
from live_part import Part
from live_server import plant, running

STEPS = 150
"""Timed, and after them profiled; ``SKIPPED`` come first."""
SKIPPED = 20
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
    return sorted(found, key=lambda row: -row[3])[:60]


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


def activate():
    Scheduler.run_batch = timed(Scheduler.run_batch)
'''
SIDES = ("plain", "ddtree65", "auto65")
"""Plain decoding, a tree, and widths by cost, whose server is held to its runs of plain steps."""


def host(part: Part, choice: Choice) -> None:
    """Milliseconds of the scheduler's steps at batches of 1 and 16, and their functions; the texts are plain's."""
    servers = {}
    for number, name in enumerate(SIDES):
        folder = part.folder / name
        plugin = plant(folder, "host_profile", PROFILE.format(folder=str(folder), skipped=SKIPPED, steps=STEPS))
        path = f"{plugin}:{os.environ.get('PYTHONPATH', '')}"
        if name == "auto65":
            servers |= plain_runs(part, 65, number, path)
        else:
            servers |= servers_of(part, [name], slot=number, PYTHONPATH=path)
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
