"""CUDA graphs beside SGLang's own, and steps over requests that are not there, which measure costs.

Verify graphs of further widths (``KDTREE_BUDGET=auto``), and graphs of the drafter's KV writes at the end of a step.

As in SGLang's own adaptive speculation (EAGLE's ``build_adaptive_runtime_state``) there is one
``DecodeCudaGraphRunner`` per width, captured at the start and exchanged on the target's model runner. The attention
backend is shared: its buffers are those of the widest, and each replay fills them for the width of its batch.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch

from treeverify.integrations.sglang.ddtree import compat
from treeverify.integrations.sglang.names import check_assigned, find, mismatch, read
from treeverify.step.window import Window

_GROUP = "sglang.srt.distributed.get_tp_group"
_HELPER = "sglang.kernels.ops.speculative.fused_kv_materialize.FusedKVMaterializeHelper"
_WORKSPACES = "_proj_workspace _k_workspace _v_workspace"
_STATE = "init_cuda_graph_state"
_ARGUMENTS = (
    "model_path",
    "revision",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "tp_size",
    "ep_size",
    "dtype",
    "quantization",
    "attention_backend",
    "speculative_draft_attention_backend",
    "speculative_draft_window_size",
    "moe_runner_backend",
    "context_length",
)
_WARM_UPS = 2
logger = logging.getLogger(__name__)


def check() -> None:
    """Check names and signatures; raises ``ConfigError``."""
    found = list(signature(find(compat.GRAPHS).__init__).parameters)
    wanted = {"model_runner", "attn_backend", "speculative_num_steps", "speculative_num_draft_tokens"}
    if not wanted <= set(found):
        raise mismatch(f"{compat.GRAPHS}.__init__", f"parameters {sorted(wanted)}", found)
    check_assigned(compat.WORKER, "_fused_kv_helper")
    check_assigned(_HELPER, _WORKSPACES)


def capture(worker: Any, ladder: tuple[int, ...]) -> dict[int, Any]:
    """Capture the target's verify graphs of each width below the widest, which SGLang has captured itself.

    Returns the runners by width, empty where this server runs without CUDA graphs. Says before what it takes at most.
    """
    runner = worker.model_runner
    widest = read(runner, "decode_cuda_graph_runner")
    if widest is None:
        return {}
    taken = max(read(runner, "graph_memory_usage").values(), default=0.0)
    widths = ", ".join(map(str, ladder[:-1]))
    logger.info(
        "treeverify: capturing verify graphs of widths %s in the shared memory pool; estimated at most %.2f GiB each, "
        "%.2f GiB in all (width %d took that, its part of the pool included); %.2f GiB are free",
        widths,
        taken,
        taken * (len(ladder) - 1),
        ladder[-1],
        _free_gib(),
    )
    found, free = {ladder[-1]: widest}, _free_gib()
    for width in reversed(ladder[:-1]):
        with torch.no_grad(), _buffers_kept(runner.attn_backend, widest):
            found[width] = type(widest)(
                runner,
                attn_backend=runner.attn_backend,
                speculative_num_steps=1,
                speculative_num_draft_tokens=width,
            )
        if found[width].captured_req_width != width:
            raise mismatch("captured_req_width", width, found[width].captured_req_width)
    logger.info("treeverify: verify graphs of widths %s took %.2f GiB", widths, free - _free_gib())
    return found


def captures(worker: Any) -> bool:
    """Tell whether this server runs decode steps as CUDA graphs."""
    return (
        torch.device(worker.device).type == "cuda" and read(worker.model_runner, "decode_cuda_graph_runner") is not None
    )


def capture_appends(worker: Any, calls: Mapping[int, Callable[[], None]]) -> dict[int, Callable[[], None]]:
    """Capture a call of DFLASH's write of features for each batch size; returns what replays them.

    No part of it is a collective (0.5.17, 0.5.23): each rank projects all features and keeps its own heads. Its
    workspaces are made before the first capture, by the largest size, and kept: a longer prefill replaces them by
    larger ones, while the graphs go on with these.
    """
    found: dict[int, Callable[[], None]] = {}
    free, pool = _free_gib(), torch.cuda.graph_pool_handle()
    for size in sorted(calls, reverse=True):
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                calls[size]()
        here.wait_stream(side)
        graph, kept = torch.cuda.CUDAGraph(), _workspaces(worker)
        with torch.no_grad(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            calls[size]()
        found[size] = partial(_replay, graph, kept)
    logger.info(
        "treeverify: graphs of the drafter's KV writes of batches %s took %.2f GiB", sorted(calls), free - _free_gib()
    )
    return found


def _replay(graph: torch.cuda.CUDAGraph, kept: list[torch.Tensor]) -> None:
    """``kept``: what the graph reads and writes, and nobody else may hold any more."""
    del kept
    graph.replay()


def _workspaces(worker: Any) -> list[torch.Tensor]:
    helper = read(worker, "_fused_kv_helper")  # None: it writes layer by layer
    return [] if helper is None else [read(helper, name) for name in _WORKSPACES.split()]


def use(worker: Any, captured: dict[int, Any], width: int) -> None:
    """Let the next verify replay the graphs of ``width``."""
    if captured:
        worker.model_runner.decode_cuda_graph_runner = captured[width]


@contextmanager
def _buffers_kept(backend: Any, widest: Any) -> Iterator[None]:
    """A graph runner lets its attention backend make buffers. The widest runner's must stay: its graphs read them."""

    def keep(max_bs: int, max_num_tokens: int, *_: Any, **__: Any) -> None:
        if max_bs > widest.max_bs or max_num_tokens > widest.max_num_token:
            had = f"at most {widest.max_bs} requests, {widest.max_num_token} tokens"
            raise mismatch(f"{type(backend).__name__}.{_STATE}", had, f"{max_bs}, {max_num_tokens}")

    setattr(backend, _STATE, keep)
    try:
        yield
    finally:
        delattr(backend, _STATE)


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


@dataclass
class Rehearsal:
    """Stands for SGLang's batch of a decode step; its requests' rows are written to slot 0, which nobody reads."""

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    spec_info: Any
    sampling_info: None = None
    can_run_decode_cuda_graph: bool = True


@contextmanager
def rehearsal(worker: Any, requests: int, context: int) -> Iterator[Rehearsal]:
    """Lend rows of the slot table to ``requests`` of ``context`` committed tokens that are spread over the pool.

    Only before the server has requests. The slots of the step itself are slot 0. What the pools hold does not matter.
    """
    runner = worker.model_runner
    pool = runner.req_to_token_pool
    table, device = pool.req_to_token, pool.req_to_token.device
    first = len(table) - pool.size  # a row that only pads comes first
    rows = table[first : first + requests]
    slots, vocabulary = read(runner, "max_total_num_tokens"), runner.model_config.vocab_size
    numbers = torch.arange(requests * context, device=device) % slots + 1
    rows[:, :context] = numbers.view(requests, context).to(table.dtype)
    try:
        yield Rehearsal(
            req_pool_indices=torch.arange(first, first + requests, device=device),
            seq_lens=torch.full((requests,), context, dtype=torch.int64, device=device),
            seq_lens_cpu=torch.full((requests,), context, dtype=torch.int64),
            spec_info=SimpleNamespace(bonus_tokens=torch.arange(requests, device=device) % vocabulary),
        )
    finally:
        rows.zero_()


def room(worker: Any) -> int:
    """Return the most tokens of one request: positions end with the model's context."""
    runner = worker.model_runner
    columns = runner.req_to_token_pool.req_to_token.shape[1]
    return int(min(columns, read(runner, "max_total_num_tokens"), runner.model_config.context_len))


def rehearse_verify(
    worker: Any, batch: Rehearsal, window: Window, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
) -> Any:
    """As ``compat.run_verify``, for a rehearsal."""
    runner = worker.model_runner
    trees = compat.verify_input(window, ids, positions, mask)
    forward_batch = compat.forward_batch_of(
        runner,
        batch,
        window,
        ids,
        positions,
        spec_algorithm=runner.spec_algorithm,
        spec_info=trees,
        capture_hidden_mode=trees.capture_hidden_mode,
    )
    out = runner.forward(forward_batch)
    return SimpleNamespace(logits_output=out.logits_output, can_run_cuda_graph=out.can_run_graph)


def description(worker: Any) -> dict[str, object]:
    """Return what of a server decides the costs of its steps, beside the device and the versions."""
    runner = worker.model_runner
    arguments = read(runner, "server_args")
    configs = [owner.model_config.hf_config.to_json_string() for owner in (runner, worker.draft_model_runner)]
    return {
        **{name: str(getattr(arguments, name, None)) for name in _ARGUMENTS},
        "configs": [hashlib.sha256(text.encode()).hexdigest()[:16] for text in configs],
        "graphs": runner.decode_cuda_graph_runner is not None,
    }


def from_first_rank(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank of the tensor-parallel group; all ranks call this at the same point."""
    return find(_GROUP)().broadcast_object(value, src=0)


def is_first_rank() -> bool:
    """Tell whether this rank's measurements count."""
    return bool(find(_GROUP)().rank_in_group == 0)


def captured_batches(worker: Any) -> list[int]:
    """Return the batches that verify graphs are captured for, rising; without graphs the most requests alone."""
    captured, most = worker.model_runner.decode_cuda_graph_runner, int(worker.model_runner.req_to_token_pool.size)
    return [most] if captured is None else sorted(batch for batch in captured.capture_bs if batch <= most)
