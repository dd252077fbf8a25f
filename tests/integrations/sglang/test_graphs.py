"""One set of graphs per allowed mode, on a stand-in for SGLang's graph backend that replays what it captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import HEADS, NODES, call, make_backend, make_layer, make_switch

from treeverify.env import VerifyMode
from treeverify.errors import ConfigError
from treeverify.integrations.sglang import graphs, modes

OFF, VALIDATE, ON = VerifyMode
BATCH = SimpleNamespace(batch_size=2)


@dataclass(frozen=True)
class Key:
    size: int
    variant_label: str | None = None


class FullGraphs:
    """As SGLang's: two warm-ups, then the capture; a replay gives what the capture computed."""

    def __init__(self) -> None:
        self.outputs: dict[Key, Any] = {}

    @contextmanager
    def capture_session(self, stream: object) -> Iterator[None]:
        yield

    def capture_one(self, shape_key: Key, forward_fn: Callable[[], Any], capture_inputs: Any = None) -> None:
        for _ in range(2):
            forward_fn()
        self.outputs[shape_key] = forward_fn()

    def replay(self, shape_key: Key, static_forward_batch: Any) -> Any:
        return self.outputs[shape_key]


class Modal(FullGraphs):
    capture_session = graphs.with_measure(FullGraphs.capture_session)
    capture_one = graphs.with_modes(FullGraphs.capture_one)
    replay = graphs.of_current_mode(FullGraphs.replay)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> modes.Switch:
    made = make_switch(OFF, VALIDATE, ON)
    monkeypatch.setattr(modes, "_current", made)
    return made


def test_each_mode_replays_the_graph_that_was_captured_in_it(switch: modes.Switch) -> None:
    backend, graph = make_backend(switch), Modal()
    with graph.capture_session(None):
        for size in (8, 4):
            graph.capture_one(Key(size, "lora"), lambda: (switch.mode, call(backend)))
    assert len(graph.outputs) == 6
    assert switch.mode is OFF
    assert backend.verifier.off.calls == 0  # captures and warm-ups are no passes
    for step, mode in enumerate((OFF, ON, VALIDATE, ON, OFF)):
        switch.change(mode, step)
        for size in (8, 4):
            captured, out = graph.replay(Key(size, "lora"), BATCH)
            assert captured is mode
            assert torch.equal(out, graph.outputs[Key(size, "lora")][1]) is (mode is not ON)
    assert backend.verifier.off.model_dump() == {"calls": 4, "rows": 4 * 2 * NODES * HEADS}


def test_a_graph_without_a_call_of_ours_is_captured_once(switch: modes.Switch) -> None:
    backend, graph = make_backend(switch, draft=True), Modal()
    graph.capture_one(Key(8), lambda: call(backend, mode="other"))
    graph.capture_one(Key(4), lambda: "none of ours")
    assert list(graph.outputs) == [Key(8), Key(4)]
    switch.change(ON, 1)
    assert graph.replay(Key(4), BATCH) == "none of ours"


def test_a_capture_while_another_mode_is_on_keeps_the_sets_apart(switch: modes.Switch) -> None:
    backend, graph = make_backend(switch), Modal()
    switch.change(ON, 1)
    graph.capture_one(Key(8), lambda: (switch.mode, call(backend, make_layer(layer_id=1))))
    assert switch.mode is ON
    assert graph.replay(Key(8), BATCH)[0] is ON


def test_a_failed_capture_leaves_the_mode_as_it_was(switch: modes.Switch) -> None:
    def fail() -> None:
        if switch.mode is ON:
            raise RuntimeError("out of memory")
        switch.ask(switch)

    with pytest.raises(RuntimeError, match="out of memory"):
        Modal().capture_one(Key(8), fail)
    assert (switch.mode, switch.capturing) == (OFF, False)


def test_memory_is_stated_before_the_further_sets_and_measured_after(
    switch: modes.Switch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph, free = Modal(), [2**30]

    def forward() -> VerifyMode:
        free[0] -= 2**20
        return switch.ask(switch)

    monkeypatch.setattr(graphs, "_free_bytes", lambda: free[0])
    with caplog.at_level(logging.INFO), graph.capture_session(None):
        graph.capture_one(Key(8), forward)
        assert "each of validate, on" in caplog.messages[0]
        assert "at most 3 MiB per set" in caplog.messages[0]
        graph.capture_one(Key(4), forward)
    assert caplog.messages[1:] == ["treeverify: 2 further graph sets of 2 shapes took 12 MiB"]


def test_graphs_of_another_kind_hold_one_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breakable(FullGraphs):
        capture_one = graphs.of_one_mode(FullGraphs.capture_one)

    single = make_switch(ON)
    monkeypatch.setattr(modes, "_current", single)
    Breakable().capture_one(Key(8), lambda: call(make_backend(single)))
    several = make_switch(OFF, ON)
    monkeypatch.setattr(modes, "_current", several)
    Breakable().capture_one(Key(8), lambda: "none of ours")
    with pytest.raises(ConfigError, match="KDTREE_VERIFY_ALLOW=off,on: Breakable cannot hold a graph per mode"):
        Breakable().capture_one(Key(8), lambda: call(make_backend(several)))
