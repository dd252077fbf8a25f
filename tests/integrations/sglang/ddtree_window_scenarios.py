"""What test_ddtree_window_engine.py looks at, as a script: ``ddtree_window_scenarios.py NAME FOLDER`` prints JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.integrations.sglang.ddtree_pair import BLOCK
from tests.integrations.sglang.ddtree_scenarios import (
    CHUNK,
    NEW,
    PROMPTS,
    abort_one_of_two,
    plain,
    retract,
    texts,
    tree,
)
from tests.integrations.sglang.ddtree_scheduler import Server
from tests.integrations.sglang.processes import say

WINDOW, SEVERAL = 8, 4


class Drafts:
    """The best tokens of each depth, of every draft of a server: by request and committed length."""

    def __init__(self, server: Server) -> None:
        self.found: dict[str, list[list[int]]] = {}
        self.lengths: list[int] = []
        """Committed tokens that the drafter was shown."""
        self._server, worker = server, server.scheduler.draft_worker
        self._head = worker.model_runner.model.lm_head.weight
        self._forward = worker.draft_model_runner.forward
        worker.draft_model_runner.forward = self._record

    def _record(self, forward_batch: Any, *rest: Any, **options: Any) -> Any:
        out = self._forward(forward_batch, *rest, **options)
        hidden = out.logits_output.hidden_states
        states = hidden.view(-1, BLOCK, hidden.shape[-1])[:, 1:].to(self._head.dtype)
        best = torch.topk(states @ self._head.T, SEVERAL).indices.tolist()
        rows = {_row(request): n for n, request in enumerate(self._server.requests) if not request.finished()}
        starts = forward_batch.positions.view(-1, BLOCK)[:, 0].tolist()
        for row, start, tokens in zip(forward_batch.req_pool_indices.tolist(), starts, best, strict=True):
            self.found[f"{rows[row]}: {start}"] = tokens
        self.lengths += forward_batch.seq_lens.tolist()
        return out


def _row(request: Any) -> Any:
    """The request's row of the slot table."""
    return request.req_pool_idx if hasattr(request, "req_pool_idx") else request.kv.req_pool_idx  # 0.5.17 before


def chain(folder: Path) -> dict[str, Any]:
    """DFLASH's own step with a window. The algorithm refuses a CPU; its class does but for two calls.

    One finds slots, by no way at all on a CPU: let it launch the kernel that it has for a GPU.
    """
    from sglang.kernels.ops.speculative import cache_locs

    from treeverify.integrations.sglang.ddtree import compat

    cache_locs._is_cuda = True
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    server = tree(folder, speculative_num_draft_tokens=BLOCK, speculative_draft_window_size=WINDOW)
    stock = compat.worker_class().forward_batch_generation  # type: ignore[attr-defined]
    type(server.scheduler.draft_worker).forward_batch_generation = stock
    drafts = Drafts(server)
    return {"together": texts(server, PROMPTS), "drafts": drafts.found}


def whole(folder: Path) -> dict[str, Any]:
    """DDTREE without a window."""
    server = tree(folder)
    drafts = Drafts(server)
    return {"together": texts(server, PROMPTS), "drafts": drafts.found}


def windowed(folder: Path) -> dict[str, Any]:
    """DDTREE with a window: together, in chunks; prefix hits, ends inside a path, an abort, a retraction."""
    from treeverify.integrations.sglang.names import version

    server = tree(folder, chunked_prefill_size=CHUNK, speculative_draft_window_size=WINDOW)
    slots, drafts = server.free_slots(), Drafts(server)
    found: dict[str, Any] = {"version": version(), "together": texts(server, PROMPTS)}
    found["drafts"], drafts.found = drafts.found, {}
    found["accepted"] = server.scheduler.draft_worker.steps.metrics.report()
    text = found["together"][2]
    request = server.submit(PROMPTS[2] + text[:4] + [1, 2], NEW)
    server.run()
    found["longer"], found["cached"] = [list(request.output_ids)[: request.finished_len]], request.cached_tokens
    found["short"] = [texts(server, PROMPTS[2:], tokens)[0] for tokens in (1, 2, 4)]
    found["aborted"] = abort_one_of_two(server)
    found["retracted"] = retract(server)
    found["slots"] = [slots, server.free_slots()]
    found["lengths"] = drafts.lengths
    worker = server.scheduler.draft_worker
    runners = (worker.model_runner, worker.draft_model_runner)
    found["tables"] = [list(runner.req_to_token_pool.req_to_token.shape) for runner in runners]
    return found


def kernel(folder: Path) -> dict[str, Any]:
    """A step ahead, with the kernel that writes the drafter's slot table on a GPU."""
    server = tree(
        folder,
        attention_backend="treeverify",
        disable_overlap_schedule=False,
        speculative_draft_window_size=WINDOW,
    )
    server.scheduler.draft_worker._use_triton_compact_rebuild = True
    slots, drafts = server.free_slots(), Drafts(server)
    requests = [server.submit(ids, NEW) for ids in PROMPTS]
    server.run_ahead()
    found = [list(request.output_ids)[: request.finished_len] for request in requests]
    return {"together": found, "drafts": drafts.found, "slots": [slots, server.free_slots()]}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    run.__name__: run for run in (plain, chain, whole, windowed, kernel)
}

if __name__ == "__main__":
    say(SCENARIOS[sys.argv[1]](Path(sys.argv[2])))
