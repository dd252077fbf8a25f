"""What the plugin does beside serving, at a bounded rate and without waiting: snapshots, metrics, dumps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from treeverify.control.metrics import Metrics
from treeverify.control.schema import RankState
from treeverify.integrations.sglang.counters import Counters
from treeverify.integrations.sglang.dump import Dumper

PERIOD_S = 5.0


class Observed(Protocol):
    """A backend as it is seen here."""

    counters: Counters
    dumper: Dumper | None


class Observer:
    """Called once per step; every ``period`` seconds it does its round, which waits only to write a dump."""

    def __init__(
        self,
        backends: Sequence[Observed],
        report: Callable[[], RankState],
        metrics: Metrics | None,
        period: float = PERIOD_S,
    ) -> None:
        """``report`` makes the rank's state from the newest snapshots; ``metrics`` is None without --enable-metrics."""
        self._backends = backends
        self._report = report
        self._metrics = metrics
        self._period = period
        self._due = 0.0

    def tick(self) -> None:
        """Do the round if it is due: metrics of the last snapshot, kept calls to files, then the next snapshot."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._period
        for backend in self._backends:
            if backend.dumper is not None:
                backend.dumper.drain(wait=False)
        if self._metrics is not None:
            self._metrics.update([self._report()])
            for backend in self._backends:
                backend.counters.snapshot()
