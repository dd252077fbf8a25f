"""Counters of the engine: steps, tokens, acceptance lengths, seconds per stage.

Stage seconds are what the host waits. On a CUDA device work is queued, so the stage that fetches a result (``accept``)
also pays for the kernels queued before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from treeverify.tree.accept import Acceptance
from treeverify.tree.topology import Tree

StepObserver = Callable[[int, Tree, Acceptance], None]
"""Called for each request of each verify step: request id, its draft tree, what was accepted before any cut."""
STAGES = ("prefill", "draft", "verify", "accept", "commit")


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

    def spent(self, stage: str, begin: float) -> float:
        """Add the time since ``begin`` to a stage (a key of ``seconds``); returns now (``time.perf_counter``)."""
        now = perf_counter()
        self.seconds[stage] += now - begin
        return now

    def step(self, widths: list[int], given: list[int]) -> None:
        """Count one step: the nodes of each request's tree, and the tokens that each was given."""
        self.steps += 1
        self.request_steps += len(widths)
        self.nodes += sum(widths)
        self.widths.update(widths)
        self.acceptance.update(given)

    @property
    def mean_acceptance(self) -> float:
        """Mean acceptance length over all steps of all requests; NaN before the first."""
        steps = sum(self.acceptance.values())
        return sum(n * count for n, count in self.acceptance.items()) / steps if steps else float("nan")

    def reset(self) -> None:
        """Start again from zero; the observer stays."""
        vars(self).update(vars(Metrics(observer=self.observer)))
