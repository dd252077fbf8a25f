from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from treeverify.bench import check, timing
from treeverify.bench.check import call_order, calls_per_replay
from treeverify.bench.rivals import TooSlowError
from treeverify.bench.timing import GraphReplay, HostReplay, ReplayError, interleave, make_replay, median, spread


class Fake:
    def __init__(self, name, log):
        self.name, self.log, self.runs = name, log, 0

    def run(self):
        self.log.append(self.name)
        self.runs += 1
        return float(self.runs)


def test_rounds_visit_every_variant_in_turn_and_drop_the_warmup():
    log = []
    runs = interleave({name: Fake(name, log) for name in "abc"}, rounds=3, warmup=2)
    assert log == list("abc") * 5
    assert runs == {name: [3.0, 4.0, 5.0] for name in "abc"}


class Timed(Fake):
    def __init__(self, name, clock, seconds):
        super().__init__(name, [])
        self.clock, self.seconds = clock, seconds

    def run(self):
        self.clock.now += self.seconds
        return super().run()


def test_a_slow_replay_sits_out_later_rounds(monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(timing, "time", clock)
    runs = interleave({"quick": Timed("quick", clock, 0.009), "slow": Timed("slow", clock, 0.011)}, rounds=5)
    assert runs == {"quick": [2.0, 3.0, 4.0, 5.0, 6.0], "slow": [2.0, 3.0, 4.0]}


def test_a_failure_in_a_round_names_the_replay():
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(ReplayError, match="RuntimeError: CUDA error") as failure:
        interleave({"a": Fake("a", []), "b": HostReplay([fail])}, rounds=2)
    assert failure.value.name == "b"


def call_with_a_buffer():
    buffer = torch.zeros(8)
    return (lambda: buffer.sum()), weakref.ref(buffer)


def test_a_graph_owns_what_its_calls_close_over_until_it_is_closed(monkeypatch):
    for name in ("Stream", "Event", "CUDAGraph", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    call, buffer = call_with_a_buffer()
    replay = GraphReplay([call])
    del call
    gc.collect()
    assert buffer() is not None
    replay.close()
    gc.collect()
    assert buffer() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_still_finds_its_buffers_after_the_free_memory_was_returned():
    replay = GraphReplay([partial(torch.mul, torch.ones(2**22, device="cuda"), 2)])
    torch.cuda.empty_cache()
    replay.results[0].zero_()
    replay.run()
    assert bool((replay.results[0] == 2).all())


def test_calls_beyond_the_limit_are_not_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(check, "event_us", lambda call: 80_000.0)
    with pytest.raises(TooSlowError, match="measured 80 ms per call, the limit is 60 ms"):
        call_order([lambda: torch.empty(0)] * 2, torch.device("cuda"))


def test_a_host_replay_runs_every_call_and_divides_by_their_number():
    done = []
    us = HostReplay([lambda: done.append(1), lambda: done.append(2)]).run()
    assert done == [1, 2]
    assert 0 < us < 1e6
    assert isinstance(make_replay([lambda: None], torch.device("cpu")), HostReplay)


def test_median_and_spread():
    assert median([5.0, 1.0, 2.0]) == 2.0
    assert spread([1.0, 2.0, 4.0]) == 1.5


@pytest.mark.parametrize(
    ("us", "sets", "calls"),
    [
        (10.0, 200, 200),  # every set once: already 2 ms
        (75.0, 2, 27),  # few sets: repeated until 2 ms are full
        (9_000.0, 8, 2),  # slow: at most 20 ms
        (25_000.0, 2, 1),
        (300_000.0, 2, 1),  # very slow: once
        (0.0, 3, 2000),
    ],
)
def test_graphs_are_long_enough_and_not_too_long(us, sets, calls):
    assert calls_per_replay(us, sets) == calls
