"""Counters and dumps inside a CUDA graph: replays count as the CPU does, and nothing waits for the device.

Run without pytest as ``PYTHONPATH=src:. python tests/integrations/sglang/gpu_observing.py``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from observing import CPU, HEADS, NODES, make_call, results, sizes

from treeverify.integrations.sglang.calls import Call
from treeverify.integrations.sglang.counters import Counters
from treeverify.integrations.sglang.dump import Dumper, Store
from treeverify.observe.calls import load

GPU = torch.device("cuda")


def _to(call: Call) -> Call:
    return Call(*(value.to(GPU) if isinstance(value, torch.Tensor) else value for value in call))


def _outcomes() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Pairs of results with what is live: equal, a row off, NaN in one, NaN in padding, NaN in both."""
    call = make_call()
    made = []
    for number in range(5):
        served, ours = results(call)
        live = torch.ones(served.shape[0], dtype=torch.bool)
        if number == 1:
            ours[NODES + 3, 1] *= 1.25
        if number == 2:
            ours[2, 0, 5] = torch.nan
        if number == 3:
            ours[NODES:], live[NODES:] = torch.nan, False
        if number == 4:
            ours[0, 0, 0] = served[0, 0, 0] = torch.inf
        made.append((served, ours, live))
    return made


def graph_counts_as_the_cpu(folder: Path) -> None:
    """One graph, replayed over changing contents: the same figures as eager calls on the CPU, and the first breach."""
    call = _to(make_call())
    served, ours, live = (tensor.to(GPU) for tensor in _outcomes()[0])
    counters, dumper = Counters(3, NODES, HEADS, GPU), Dumper(Store(folder, "gpu", 8), sizes(GPU), {})
    plain = Counters(3, NODES, HEADS, CPU)

    def step() -> None:
        dumper.capture(call, served, ours, counters.record(call.layer, served, ours, live, call.nodes))

    graph = _captured(step)
    before = counters.read()["layers"]
    warm = before[0]["calls"] if before else 0
    for replayed in _outcomes():
        for static, fresh in zip((served, ours, live), replayed, strict=True):
            static.copy_(fresh)
        graph.replay()
        plain.record(call.layer, *replayed, call.nodes)
    (got,), (want,) = counters.read()["layers"], plain.read()["layers"]
    for name in ("mismatched_rows", "max_abs", "max_row_ulp", "worst_node", "worst_head"):
        assert got[name] == want[name], (name, got, want)
    assert abs(got["max_relative"] - want["max_relative"]) <= 1e-5 * want["max_relative"]
    assert got["calls"] == want["calls"] + warm
    assert got["histogram"][1:] == want["histogram"][1:]
    assert counters.read()["breaches"] == plain.read()["breaches"] == 2
    path = dumper.drain(wait=True)
    assert path is not None
    kept = load(path)
    assert kept.notes["request"] == "1"  # the first breach, not the later one
    assert kept.ours is not None
    assert torch.equal(kept.ours, _outcomes()[1][1][NODES:])
    assert torch.equal(kept.kbuf, make_call().kv_pool[make_call().kv_indices[7:10]])
    assert dumper.drain(wait=True) is None


def nothing_waits(folder: Path) -> None:
    """Recording, capturing, a snapshot and a round without a dump, while torch refuses to wait."""
    call = _to(make_call())
    served, ours, live = (tensor.to(GPU) for tensor in _outcomes()[0])
    counters, dumper = Counters(3, NODES, HEADS, GPU), Dumper(Store(folder, "gpu", 8), sizes(GPU), {})
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            dumper.capture(call, served, ours, counters.record(call.layer, served, ours, live, call.nodes))
            counters.snapshot()
            counters.read(wait=False)
            assert dumper.drain(wait=False) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert counters.read(wait=False)["layers"][0]["calls"] >= 1
    assert counters.read()["layers"][0]["calls"] == 2


def _captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


CHECKS = {check.__name__: check for check in (graph_counts_as_the_cpu, nothing_waits)}


if __name__ == "__main__":
    for name, check in CHECKS.items():
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))
        print(f"{name}: ok")
