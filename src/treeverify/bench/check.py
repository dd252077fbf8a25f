"""One implementation on one workload: how many calls its graph holds, and whether it computes what it should."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from treeverify.bench.rivals import MOST_CALL_US, Call, TooSlowError
from treeverify.bench.timing import GraphReplay, Replay, event_us
from treeverify.bench.workloads import SCALE, Workload
from treeverify.ops.tree_attention.reference import tree_attention_reference

LEAST_REPLAY_US, MOST_REPLAY_US = 2_000.0, 20_000.0


def reference(work: Workload, tree: bool, number: int) -> torch.Tensor:
    """Exact output ``[bs * nodes, heads, 512]`` in float64 on KV set ``number``, with the tree mask or causal."""
    kv = work.sets[number]
    visibility = {"mask": work.mask, "mask_indptr": work.mask_indptr} if tree else {"mask": None, "mask_indptr": None}
    exact, _ = tree_attention_reference(
        work.q,
        kv.draft_kv,
        work.pool,
        work.kv_indptr,
        kv.prefix_slots,
        nodes=work.point.nodes,
        scale=SCALE,
        **visibility,
    )
    return exact


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """norm(got - exact) / norm(exact); NaN if ``got`` has one."""
    return float((got.to(exact.dtype).view_as(exact) - exact).norm() / exact.norm())


def calls_per_replay(us: float, sets: int) -> int:
    """Number of calls in one graph: over every KV set, at least 2 ms and at most 20 ms long, never none."""
    wanted = max(sets, math.ceil(LEAST_REPLAY_US / max(us, 1.0)))
    return max(1, min(wanted, int(MOST_REPLAY_US / max(us, 1.0))))


def call_order(calls: Sequence[Call], device: torch.device) -> list[int]:
    """KV sets of one graph's calls, after a first call (compilation, tables) and a timed second one.

    Raises ``TooSlowError`` if that one takes longer than ``MOST_CALL_US``.
    """
    calls[0]()
    if device.type != "cuda":
        return list(range(len(calls)))
    torch.cuda.synchronize()
    us = event_us(calls[-1])
    if us > MOST_CALL_US:
        raise TooSlowError("measured", us)
    count = calls_per_replay(us, len(calls))
    return [number % len(calls) for number in range(count)]


def error_of_replay(replay: Replay, last: Call, exact: torch.Tensor) -> float:
    """Error of what a replay writes into a poisoned output: that of the graph's last call."""
    if not isinstance(replay, GraphReplay):
        return relative_error(last(), exact)
    (out,) = replay.results
    assert isinstance(out, torch.Tensor)
    out.fill_(math.nan)
    replay.run()
    return relative_error(out, exact)
