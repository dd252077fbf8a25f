"""Timing: interleaved rounds, so that clock drift falls on every variant alike; medians, with all runs kept.

A *replay* runs ``calls`` calls of one variant and returns the microseconds of one call. On a GPU it is the replay of a
CUDA graph between two events (``GraphReplay``): no launch gaps, no allocation, no host work. On a CPU it is the host
clock around plain calls (``HostReplay``).

A graph holds addresses, not tensors: a replay owns its calls, and with them every tensor that they close over, until
it is closed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from treeverify.errors import TreeverifyError

_cuda: Any = torch.cuda  # its classes are untyped


SLOW_SECONDS, SLOW_ROUNDS = 0.010, 3
"""A replay that takes longer than this takes part in so few rounds only."""


class ReplayError(TreeverifyError):
    """A replay failed in a round; everything before it had been waited for, so the failure is its own."""

    def __init__(self, name: str, reason: str) -> None:
        """Remember whose replay it was."""
        super().__init__(f"in a timed round: {reason}")
        self.name = name


class Replay(Protocol):
    """One variant, ready to be timed."""

    def run(self) -> float:
        """Run all its calls once; return microseconds per call."""


class HostReplay:
    """Plain calls under the host clock."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        """``calls`` are run in this order by every replay."""
        self._calls = calls

    def run(self) -> float:
        """Run the calls once; microseconds per call."""
        begin = time.perf_counter()
        for call in self._calls:
            call()
        return (time.perf_counter() - begin) * 1e6 / len(self._calls)


class GraphReplay:
    """The calls captured into one CUDA graph; a replay is timed by events on the device."""

    def __init__(self, calls: Sequence[Callable[[], object]], *, warmup: int = 1) -> None:
        """Run ``warmup`` of the calls (compilation, module load, attributes), then capture all of them."""
        side = _cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls[:warmup]:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.results: list[object] = []
        self._calls: Sequence[Callable[[], object]] = calls  # owns the memory that the graph reads and writes
        self._count = len(calls)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                self.results = [call()]  # only the last: every call before it may reuse that memory
        self._begin = _cuda.Event(enable_timing=True)
        self._end = _cuda.Event(enable_timing=True)

    def run(self) -> float:
        """Replay once and wait; microseconds per call."""
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e3 / self._count

    def close(self) -> None:
        """Free the graph, the memory its capture allocated, and the calls."""
        self._graph.reset()
        self.results, self._calls = [], ()


def make_replay(calls: Sequence[Callable[[], object]], device: torch.device) -> Replay:
    """Return the replay that fits ``device``."""
    return GraphReplay(calls) if device.type == "cuda" else HostReplay(calls)


def event_us(call: Callable[[], object]) -> float:
    """Microseconds of one call on the device, launch gaps included."""
    begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def interleave(replays: Mapping[str, Replay], rounds: int, *, warmup: int = 1) -> dict[str, list[float]]:
    """Run every replay once per round, in the mapping's order; return each one's microseconds per call, by round.

    ``warmup`` rounds come first and are not counted. A replay longer than ``SLOW_SECONDS`` sits out the rounds after
    ``SLOW_ROUNDS``. Raises ``ReplayError`` for a replay that fails.
    """
    runs: dict[str, list[float]] = {name: [] for name in replays}
    slow: set[str] = set()
    for turn in range(warmup + rounds):
        for name, replay in replays.items():
            if name in slow and turn >= warmup + SLOW_ROUNDS:
                continue
            begin = time.perf_counter()
            try:
                us = replay.run()
            except RuntimeError as error:
                raise ReplayError(name, f"{type(error).__name__}: {error}") from error
            if time.perf_counter() - begin > SLOW_SECONDS:
                slow.add(name)
            if turn >= warmup:
                runs[name].append(us)
    return runs


def median(runs: Sequence[float]) -> float:
    """Median of a non-empty list of runs."""
    return statistics.median(runs)


def spread(runs: Sequence[float]) -> float:
    """Largest minus smallest run, as a fraction of the median."""
    return (max(runs) - min(runs)) / median(runs)
