"""What DDTREE counts, on the host and from what the host has anyway: nothing here waits for the device."""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol

STAGES = ("draft", "verify", "accept", "commit")


class Choices(Protocol):
    """Who chooses the widths (``auto.Auto``)."""

    def report(self) -> dict[str, object] | None:
        """What was chosen, as plain values."""


class Metrics:
    """Counters of one worker since its start."""

    def __init__(self, width: int, block: int, choices: Choices | None = None) -> None:
        """``choices``: who chooses the widths, None where they are fixed."""
        self.width, self.block = width, block
        self._choices = choices
        self.simulated_acceptance: float | None = None
        """Tokens a step that are simulated, not the target's (`simulated`)."""
        self.steps = self.request_steps = self.nodes = 0
        self.accepted: Counter[int] = Counter()
        """Requests' steps by acceptance length (tokens committed, the root counted)."""
        self.restart_clocks()

    def restart_clocks(self) -> None:
        """Forget the times of stages."""
        self.seconds = dict.fromkeys(STAGES, 0.0)
        """Host time by stage: launching under CUDA, the whole stage on a CPU."""

    def spent(self, stage: str, begin: float) -> float:
        """Add the time since ``begin`` to a stage; returns now, where the next stage begins (``time.perf_counter``)."""
        now = time.perf_counter()
        self.seconds[stage] += now - begin
        return now

    def step(self, requests: int, width: int, count: int = 1) -> None:
        """Count ``count`` steps of a batch when they are launched."""
        self.steps += count
        self.request_steps += count * requests
        self.nodes += count * requests * width

    def accept(self, drafted: list[int]) -> None:
        """Count accepted draft tokens per request, once SGLang has them on the host."""
        self.accepted.update(count + 1 for count in drafted)

    def report(self) -> dict[str, object]:
        """Return the counters as plain values."""
        known = sum(self.accepted.values())
        tokens = sum(length * count for length, count in self.accepted.items())
        return {
            "width": self.width,
            "block": self.block,
            "steps": self.steps,
            "request_steps": self.request_steps,
            "nodes": self.nodes,
            "simulated_acceptance": self.simulated_acceptance,
            "acceptance_length": tokens / known if known else None,
            "acceptance_lengths": {str(length): self.accepted[length] for length in sorted(self.accepted)},
            "host_seconds": dict(self.seconds),
            "auto": None if self._choices is None else self._choices.report(),
        }
