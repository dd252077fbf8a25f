"""Counters of the engine: steps, tokens, acceptance lengths, seconds per stage. The only reader of the clock.

Stage seconds are what the host waits. On a CUDA device work is queued, so the stage that fetches a result (``accept``)
also pays for the kernels queued before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType

from treeverify.tree.accept import Acceptance
from treeverify.tree.topology import Tree

StepObserver = Callable[[int, Tree, Acceptance], None]
"""Called for each request of each verify step: request id, its draft tree, what was accepted before any cut."""
STAGES = ("prefill", "draft", "tree", "verify", "accept", "commit")


class _Stage:
    """Adds the time between enter and exit to one stage."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name, self._began = seconds, name, 0.0

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds[self._name] += perf_counter() - self._began


@dataclass
class Metrics:
    """Totals since the engine was made, or since ``reset``."""

    steps: int = 0  # verify forwards
    request_steps: int = 0  # verify forwards times the requests in each
    tokens: int = 0  # new tokens given out, those of prefill included
    prefill_tokens: int = 0
    retractions: int = 0
    acceptance: Counter[int] = field(default_factory=Counter)  # acceptance length (root counted) -> steps
    nodes: int = 0  # draft nodes verified, roots included
    widths: Counter[int] = field(default_factory=Counter)  # nodes of a request's tree, root included -> steps
    moved_rows: int = 0  # KV rows moved at commit, per layer
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    observer: StepObserver | None = None

    def stage(self, name: str) -> _Stage:
        """A context manager that times one stage (a key of ``seconds``)."""
        return _Stage(self.seconds, name)

    @property
    def mean_acceptance(self) -> float:
        """Mean acceptance length over all steps of all requests; NaN before the first."""
        steps = sum(self.acceptance.values())
        return sum(n * count for n, count in self.acceptance.items()) / steps if steps else float("nan")

    def reset(self) -> None:
        """Start again from zero; the observer stays."""
        vars(self).update(vars(Metrics(observer=self.observer)))
