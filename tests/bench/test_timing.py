from __future__ import annotations

import pytest
import torch

from treeverify.bench.check import calls_per_replay
from treeverify.bench.timing import HostReplay, interleave, make_replay, median, spread


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
        (25_000.0, 2, 2),
        (25_000.0, 8, 2),  # slow: at most 60 ms
        (300_000.0, 2, 1),  # very slow: once
        (0.0, 3, 2000),
    ],
)
def test_graphs_are_long_enough_and_not_too_long(us, sets, calls):
    assert calls_per_replay(us, sets) == calls
