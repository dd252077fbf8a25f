"""Graphs of the drafter's KV writes: order of captures, kept workspaces, and who captures at all."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treeverify.integrations.sglang.ddtree import graphs


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
