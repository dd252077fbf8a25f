"""What test_ddtree_auto_engine.py looks at, as a script: ``ddtree_auto_scenarios.py NAME FOLDER`` prints one object."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.integrations.sglang import ddtree_scenarios as fixed
from tests.integrations.sglang.ddtree_scenarios import CHUNK, NEW, PROMPTS, texts, tree
from tests.integrations.sglang.ddtree_scheduler import Server
from tests.integrations.sglang.processes import say

SCHEDULE = (17, 5, 1, 9, 5, 17, 9)
"""Widths of steps, one after the other; 1 is a run of plain steps."""


def steps_of(server: Server) -> Any:
    return server.scheduler.draft_worker.steps


def plant(server: Server, schedule: tuple[int, ...] = SCHEDULE) -> Callable[..., Any]:
    """Let the widths follow ``schedule``, whatever they cost; returns the choice's own plan."""
    choice, widths, runs = steps_of(server).auto._choice, cycle(schedule), cycle((4, 1, 2))
    stock: Callable[..., Any] = choice.plan

    def plan(*arguments: Any) -> Any:
        before, found, width = +choice.widths, stock(*arguments), next(widths)
        run = next(runs) if width == 1 else 1
        choice.widths = before + Counter({width: run})
        return found._replace(width=width, run=run, kind=found.kind._replace(rung=choice.ladder.index(width)))

    choice.plan = plan
    return stock


def watch_draft_rows(server: Server) -> list[int]:
    """Collect the positions whose rows are written to the drafter's KV, in order."""
    worker, found = server.scheduler.draft_worker, list[int]()
    stock = worker._append_target_hidden_to_draft_kv_by_loc

    def append(**given: Any) -> None:
        found.extend(given["positions"][given["cache_loc"] != 0].tolist())
        stock(**given)

    worker._append_target_hidden_to_draft_kv_by_loc = append
    return found


def planted(folder: Path) -> dict[str, Any]:
    """Widths change every step: alone, together, prefix hits, ends inside a path, aborts, retraction, sampling."""
    server = tree(folder, chunked_prefill_size=CHUNK)
    plant(server)
    slots = server.free_slots()
    found: dict[str, Any] = {"together": texts(server, PROMPTS)}
    request = server.submit(PROMPTS[2] + found["together"][2][:4] + [1, 2], NEW)
    server.run()
    found["longer"], found["cached"] = [list(request.output_ids)[: request.finished_len]], request.cached_tokens
    server.scheduler.flush_cache()
    rows = watch_draft_rows(server)
    found["alone"], found["rows"] = texts(server, PROMPTS[:1]), list(rows)
    found["short"] = [texts(server, PROMPTS[2:], tokens)[0] for tokens in (1, 2, 4)]
    found["aborted"] = fixed.abort_one_of_two(server)
    found["retracted"] = fixed.retract(server)
    mixed = [server.submit(PROMPTS[0], NEW), server.submit(PROMPTS[2], NEW, temperature=1.0, sampling_seed=5)]
    server.run()
    found["mixed"] = [list(request.output_ids)[:NEW] for request in mixed]
    found["drawn"] = []
    for schedule in ((1,), (17,)):
        plant(server, schedule)
        found["drawn"].append([texts(server, PROMPTS, temperature=1.0, sampling_seed=5) for _ in range(3)])
    found["slots"], found["report"] = [slots, server.free_slots()], steps_of(server).metrics.report()
    return found


def ahead(folder: Path) -> dict[str, Any]:
    """On our backend, a step ahead: widths as planted, then by the choice's own."""
    server = tree(folder, attention_backend="treeverify", disable_overlap_schedule=False, enable_metrics=True)
    return _both(server, Server.run_ahead)


def oldest(folder: Path) -> dict[str, Any]:
    """The same on SGLang 0.5.17, whose overlap scheduling needs a GPU: a step after the other."""
    return _both(tree(folder, attention_backend="treeverify", enable_metrics=True), Server.run)


def _both(server: Server, run: Callable[[Server], None]) -> dict[str, Any]:
    from treeverify.integrations.sglang.names import version

    stock, slots = plant(server), server.free_slots()
    requests = [server.submit(ids, NEW) for ids in PROMPTS]
    requests.append(server.submit(PROMPTS[1], NEW, temperature=1.0, sampling_seed=5))
    run(server)
    found: dict[str, Any] = {"together": [list(request.output_ids)[: request.finished_len] for request in requests]}
    found["planted"] = steps_of(server).metrics.report()
    steps_of(server).auto._choice.plan = stock
    requests = [server.submit(ids, NEW) for ids in PROMPTS]
    run(server)
    found["chosen"] = [list(request.output_ids)[: request.finished_len] for request in requests]
    found["report"], found["version"] = steps_of(server).metrics.report(), version()
    found["slots"] = [slots, server.free_slots()]
    found["counts"] = _counts()
    found["exported"] = _exported()
    return found


def _exported() -> dict[str, float | None]:
    """Counters at ``/metrics`` as of the first round."""
    from prometheus_client import REGISTRY

    names = ("treeverify_ddtree_steps_total", "treeverify_ddtree_gain")
    return {name: REGISTRY.get_sample_value(name, {"group": "0", "rank": "0"}) for name in names}


def _counts() -> dict[str, int]:
    """Rows that our backend has counted, by mode."""
    from treeverify.integrations.sglang import probe

    (backend,) = probe.rank(0).backends
    return {mode: counts.rows for mode, counts in backend.served.items()}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {run.__name__: run for run in (planted, ahead, oldest)}

if __name__ == "__main__":
    say(SCENARIOS[sys.argv[1]](Path(sys.argv[2])))
