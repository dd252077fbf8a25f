"""What test_ddtree_engine.py looks at, as a script: ``ddtree_scenarios.py NAME FOLDER`` prints one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.integrations.sglang.ddtree_pair import BLOCK, VOCAB
from tests.integrations.sglang.ddtree_scheduler import Server
from tests.integrations.sglang.processes import say

WIDTH, NEW, CHUNK, CONTEXT = 17, 14, 8, 40
PROMPTS = [[(7 * i * i + 3 * j + j * j * i + i) % (VOCAB - 1) for j in range(6 + 5 * i)] for i in range(3)]


def tree(folder: Path, **changes: Any) -> Server:
    """A server with DDTREE; prompts longer than a chunk are prefilled in pieces."""
    return Server(
        folder / "target",
        speculative_algorithm="DDTREE",
        speculative_draft_model_path=str(folder / "drafter"),
        **{"speculative_num_draft_tokens": WIDTH} | changes,
    )


def texts(server: Server, prompts: list[list[int]], tokens: int = NEW, **sampling: Any) -> list[list[int]]:
    """Texts of requests that run together; as long as asked for, whatever the last step accepted beyond."""
    requests = [server.submit(ids, tokens, **sampling) for ids in prompts]
    server.run()
    return [list(request.output_ids)[: request.finished_len] for request in requests]


def acceptance(server: Server) -> dict[str, Any]:
    """What the worker has counted, and beside it what all requests so far were given after prefill, in how many steps.

    A request that was taken back and prefilled again has got a token in that prefill too.
    """
    given = [
        len(request.output_ids[: request.finished_len]) - 1 - request.retraction_count for request in server.requests
    ]
    steps = sum(request.spec_verify_ct for request in server.requests)
    return server.scheduler.draft_worker.steps.metrics.report() | {"given": sum(given), "request verify steps": steps}


def plain(folder: Path) -> dict[str, Any]:
    """Texts without speculation, of the prompts and of what the tree scenarios make of them."""
    server = Server(folder / "target")
    found = texts(server, PROMPTS)
    longer = [PROMPTS[2] + found[2][:4] + [1, 2]]
    return {"texts": found, "longer": texts(server, longer)}


def served(folder: Path) -> dict[str, Any]:
    """DDTREE on SGLang's Triton backend: alone, together, prefix hits, ends inside a path, aborts, retraction."""
    server = tree(folder, chunked_prefill_size=CHUNK)
    slots = server.free_slots()
    found: dict[str, Any] = {"together": texts(server, PROMPTS)}
    found["accepted"] = acceptance(server)
    found["alone"] = [texts(server, [ids])[0] for ids in PROMPTS[:2]]
    text = found["together"][2]
    request = server.submit(PROMPTS[2] + text[:4] + [1, 2], NEW)
    server.run()
    found["longer"], found["cached"] = [list(request.output_ids)[: request.finished_len]], request.cached_tokens
    found["short"] = [texts(server, PROMPTS[2:], tokens)[0] for tokens in (1, 2, 4)]
    stop = next(token for token in text if token != text[0])
    found["stop"], found["stopped"] = stop, texts(server, PROMPTS[2:], stop_token_ids=[stop], ignore_eos=False)
    found["aborted"] = abort_one_of_two(server)
    found["retracted"] = retract(server)
    found["in all"] = acceptance(server)
    found["slots"] = [slots, server.free_slots()]
    return found


def abort_one_of_two(server: Server) -> list[int]:
    """The text of a request whose neighbour is aborted after two steps."""
    from sglang.srt.managers.io_struct import AbortReq

    kept, gone = server.submit(PROMPTS[0], NEW), server.submit(PROMPTS[1], NEW)
    for _ in range(5):
        server.step()
    server.scheduler.abort_request(AbortReq(rid=gone.rid))
    server.run()
    assert len(gone.output_ids) < NEW, "it was finished before it could be aborted"
    return list(kept.output_ids)[:NEW]


def retract(server: Server) -> dict[str, Any]:
    """Texts of requests of which SGLang takes one back in the middle, and how often it did."""
    from sglang.srt.managers import scheduler

    requests = [server.submit(ids, NEW) for ids in PROMPTS]
    for _ in range(6):
        server.step()
    scheduler.TEST_RETRACT, kept, scheduler.TEST_RETRACT_INTERVAL = True, scheduler.TEST_RETRACT_INTERVAL, 1
    server.step()
    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = False, kept
    count = sum(request.retraction_count for request in requests)
    server.run()
    return {"count": count, "texts": [list(request.output_ids)[:NEW] for request in requests]}


def sampled(folder: Path) -> dict[str, Any]:
    """Our backend serves (KDTREE_VERIFY=on); seeds, greedy and sampling requests in one batch, refusals, the report."""
    from treeverify.integrations.sglang.ddtree import plugin

    server = tree(folder, attention_backend="treeverify")
    found: dict[str, Any] = {"together": texts(server, PROMPTS)}
    first = [server.submit(PROMPTS[0], NEW), server.submit(PROMPTS[2], NEW, temperature=1.0, sampling_seed=5)]
    server.run()
    found["mixed"] = [list(request.output_ids)[:NEW] for request in first]
    found["drawn"] = [texts(server, [PROMPTS[2]], temperature=1.0, sampling_seed=seed)[0] for seed in (5, 5, 6, 9)]
    found["filtered"] = texts(server, [PROMPTS[2]], temperature=0.9, top_k=3, top_p=0.8, min_p=0.05)[0]
    refused = [server.submit(PROMPTS[0], 4, **options) for options in ({"frequency_penalty": 0.5}, {"regex": "a"})]
    server.run()
    found["refused"] = [request.finished_reason.to_json() for request in refused]
    found["report"] = plugin.report()
    return found


def oldest(folder: Path) -> dict[str, Any]:
    """The same texts on SGLang 0.5.17, with our backend."""
    from treeverify.integrations.sglang.names import version

    return {"version": version(), "together": texts(tree(folder, attention_backend="treeverify"), PROMPTS)}


def ahead(folder: Path) -> dict[str, Any]:
    """Overlap scheduling, with a sampling request among greedy ones."""
    server = tree(folder, attention_backend="treeverify", disable_overlap_schedule=False)
    assert server.scheduler.enable_overlap
    slots = server.free_slots()
    requests = [server.submit(ids, NEW) for ids in PROMPTS]
    requests.append(server.submit(PROMPTS[1], NEW, temperature=1.0, sampling_seed=5))
    server.run_ahead()
    found = [list(request.output_ids)[: request.finished_len] for request in requests]
    counted = acceptance(server)
    return {"together": found[:3], "drawn": len(found[3]), "slots": [slots, server.free_slots()], "accepted": counted}


def replayed(folder: Path) -> dict[str, Any]:
    """The end of each step through buffers of 1, 2 or 4 requests, as where it is a CUDA graph; three run together."""
    from treeverify.integrations.sglang.ddtree import graphs

    replays: list[int] = []

    def capture(_: Any, calls: Mapping[int, Callable[[], None]]) -> dict[int, Callable[[], None]]:
        return {size: lambda size=size, call=call: (replays.append(size), call())[1] for size, call in calls.items()}

    graphs.captures, graphs.captured_batches, graphs.capture_appends = lambda _: True, lambda _: [1, 2, 4], capture
    server = tree(folder, chunked_prefill_size=CHUNK)
    slots = server.free_slots()
    found: dict[str, Any] = {"together": texts(server, PROMPTS), "alone": texts(server, PROMPTS[1:2])}
    server.scheduler.flush_cache()
    found["pair"] = texts(server, PROMPTS[1:])
    found["replays"], found["slots"] = sorted(set(replays)), [slots, server.free_slots()]
    found["counted"] = [len(replays), server.scheduler.draft_worker.steps.metrics.report()["steps"]]
    return found


def brim_plain(folder: Path) -> dict[str, Any]:
    """Texts without speculation that go on to the end of a short context."""
    return {"texts": texts(Server(folder / "target", context_length=CONTEXT), PROMPTS, CONTEXT)}


def brim(folder: Path) -> dict[str, Any]:
    """The same with trees, a step ahead: the last ones are drafted beyond the end."""
    server = tree(folder, context_length=CONTEXT, disable_overlap_schedule=False)
    slots = server.free_slots()
    requests = [server.submit(ids, CONTEXT) for ids in PROMPTS]
    server.run_ahead()
    found = [list(request.output_ids)[: request.finished_len] for request in requests]
    return {"texts": found, "slots": [slots, server.free_slots()]}


def broken(folder: Path) -> dict[str, Any]:
    """Texts when the mask is dropped, and when the accepted rows are not moved: they must differ from plain's."""
    from treeverify.integrations.sglang.ddtree import compat
    from treeverify.step import step

    server = tree(folder)
    stock, move = compat.run_verify, step.kv_compact
    compat.run_verify = lambda *arguments: stock(*arguments[:-1], None)
    found = {"mask": texts(server, PROMPTS)}
    compat.run_verify = stock
    step.kv_compact = lambda *_: None
    server.scheduler.flush_cache()
    found["move"] = texts(server, PROMPTS)
    step.kv_compact = move
    server.scheduler.flush_cache()
    found["whole"] = texts(server, PROMPTS[:1])
    return found


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    run.__name__: run for run in (plain, served, sampled, oldest, ahead, replayed, brim_plain, brim, broken)
}

if __name__ == "__main__":
    assert BLOCK < WIDTH
    say(SCENARIOS[sys.argv[1]](Path(sys.argv[2])))
