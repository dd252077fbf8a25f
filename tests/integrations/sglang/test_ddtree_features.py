"""The end of a step: graphs of the drafter's KV writes serve smaller batches, and leave nothing of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treeverify.integrations.sglang.ddtree import graphs
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.tree_accept.contract import Accepted
from treeverify.step.features import Features

WIDTH, COLUMNS, DIM, SLOTS = 6, 4, 5, 200
SIZES = (4, 1, 2)


class Drafter:
    """A drafter's KV that keeps features and positions by slot; slot 0 is nobody's."""

    def __init__(self) -> None:
        self.features, self.positions = torch.full((SLOTS, DIM), torch.nan), torch.full((SLOTS,), -1)
        self.written: list[int] = []

    def append(self, rows: Gathered) -> None:
        slots = rows.slots.flatten()
        self.features[slots], self.positions[slots] = rows.features.flatten(0, 1), rows.positions.flatten()
        self.written.append(len(rows.slots))

    def same(self, other: Drafter) -> bool:
        features, wanted = self.features[1:].view(torch.int32), other.features[1:].view(torch.int32)
        return torch.equal(features, wanted) and torch.equal(self.positions[1:], other.positions[1:])


def as_they_are(calls: Mapping[int, Callable[[], None]]) -> Mapping[int, Callable[[], None]]:
    """Stands for a capture, which runs what it captures."""
    for call in calls.values():
        call()
    return calls


def step(batch: int, seed: int) -> tuple[torch.Tensor, Accepted, torch.Tensor, torch.Tensor]:
    """What a step of ``batch`` requests hands over; what no path names is NaN."""
    random = torch.Generator().manual_seed(seed)
    features = torch.full((batch * WIDTH, DIM), torch.nan)
    accepted = Accepted.empty(batch, WIDTH, COLUMNS - 1, "cpu")
    accepted.path.fill_(-1)
    for request in range(batch):
        length = int(torch.randint(1, COLUMNS + 1, (), generator=random))
        rest = torch.randperm(WIDTH - 1, generator=random)[: length - 1].sort().values + 1
        path = torch.cat([torch.zeros(1, dtype=torch.int64), rest])
        accepted.path[request, :length], accepted.lengths[request] = path.int(), length
        features[request * WIDTH + path] = torch.randn(length, DIM, generator=random)
    slots = torch.randperm(SLOTS - 1, generator=random)[: batch * WIDTH].view(batch, WIDTH) + 1
    return features, accepted, slots, torch.randint(0, 99, (batch,), generator=random)


def test_replays_write_what_a_step_without_a_graph_writes() -> None:
    """Batches that shrink and grow; the drafter's rows change in between, so that a row written again would show."""
    graphed, plain = Drafter(), Drafter()
    with_graphs, without = Features(graphed.append), Features(plain.append)
    for run in (with_graphs, without):
        run(*step(2, 0))
    with_graphs.capture(SIZES, as_they_are)
    assert graphed.same(plain), "a capture wrote to a slot"
    graphed.written.clear()
    for seed, batch in enumerate((4, 1, 3, 2, 4, 5, 3), start=1):
        for drafter in (graphed, plain):
            drafter.features.fill_(torch.nan)
            drafter.positions.fill_(-seed)
        with_graphs(*step(batch, seed))
        without(*step(batch, seed))
        assert graphed.same(plain), batch
        assert not graphed.features[0].isnan().any(), "padding that is not finite"
    assert graphed.written == [4, 1, 4, 2, 4, 5, 4]


def test_buffers_of_graphs_never_move() -> None:
    seen: list[int] = []
    features = Features(lambda rows: seen.append(rows.slots.data_ptr()))
    features(*step(1, 0))
    features.capture(SIZES, as_they_are)
    seen.clear()
    for batch in (4, 1, 2, 3):
        features(*step(batch, batch))
    assert len(set(seen)) == 1


class Cuda:
    """The names of ``torch.cuda`` that a capture uses; notes what it does in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[Any] = []
        stream = SimpleNamespace(wait_stream=lambda _: None)
        for name, value in {
            "graph_pool_handle": lambda: "pool",
            "current_stream": lambda *_: stream,
            "Stream": lambda: stream,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.notes.append("replay")),
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def graph(self, _: Any, *, pool: str, capture_error_mode: str) -> Any:
        self.notes.append((pool, capture_error_mode))
        return nullcontext()


def test_the_largest_is_captured_first_and_workspaces_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang replaces its workspaces by larger ones when a longer prefill comes."""
    cuda, helper = Cuda(monkeypatch), SimpleNamespace(_proj_workspace=None, _k_workspace=None, _v_workspace=None)
    worker = SimpleNamespace(_fused_kv_helper=helper)
    caplog.set_level("INFO")

    def call(size: int) -> None:
        cuda.notes.append(size)
        if helper._proj_workspace is None:
            helper._proj_workspace, helper._k_workspace, helper._v_workspace = torch.empty(3, size).unbind()

    found = graphs.capture_appends(worker, {1: lambda: call(1), 4: lambda: call(4)})
    assert cuda.notes == [4, 4, ("pool", "thread_local"), 4, 1, 1, ("pool", "thread_local"), 1]
    first = helper._proj_workspace
    helper._proj_workspace = torch.empty(9)
    assert all(any(kept is first for kept in replay.args[1]) for replay in found.values())  # type: ignore[attr-defined]
    found[1]()
    assert cuda.notes[-1] == "replay"
    assert "batches [1, 4] took 0.00 GiB" in caplog.text
    assert graphs.capture_appends(SimpleNamespace(_fused_kv_helper=None), {2: lambda: call(2)}).keys() == {2}


def test_only_a_server_with_graphs_on_a_gpu_captures() -> None:
    for device, runner, wanted in (("cuda", object(), True), ("cuda", None, False), ("cpu", object(), False)):
        model_runner = SimpleNamespace(decode_cuda_graph_runner=runner)
        assert graphs.captures(SimpleNamespace(device=device, model_runner=model_runner)) is wanted
