"""What DDTREE counts, on the host and from what the host has anyway: nothing here waits for the device."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Protocol

STAGES = ("draft", "verify", "accept", "commit")


class Choices(Protocol):
    """Who chooses the widths (``auto.Auto``)."""

    def report(self) -> dict[str, Any] | None:
        """What was chosen, as plain values."""


class Metrics:
    """Counters of one worker since its start."""

    def __init__(self, width: int, block: int, choices: Choices | None = None) -> None:
        """``choices``: who chooses the widths, None where they are fixed."""
        self.width, self.block = width, block
        self._choices = choices
        self.simulated_acceptance: float | None = None
        """Tokens a step that are simulated, not the target's (`simulated`)."""
        self.steps = self.request_steps = self.nodes = self.plain_request_steps = 0
        self.accepted: Counter[int] = Counter()
        """Requests' drafted steps by acceptance length: tokens given out, which end where the text does."""
        self.drafted = True
        """Whether the step whose outcome came last was a drafted one, not plain steps."""
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
        """Count ``count`` steps of a batch when they are launched; of width 1 they are plain ones."""
        self.steps += count
        self.request_steps += count * requests
        self.nodes += count * requests * width
        if width == 1:
            self.plain_request_steps += count * requests

    def accept(self, lengths: list[int]) -> None:
        """Count the tokens that each request has given out in the step whose outcome came last, if it drafted."""
        if self.drafted:
            self.accepted.update(lengths)

    @property
    def tokens(self) -> int:
        """Tokens that drafted steps gave out."""
        return sum(length * count for length, count in self.accepted.items())

    def choices(self) -> dict[str, Any] | None:
        """The choices of widths so far as plain values, None where the width is fixed."""
        return None if self._choices is None else self._choices.report()

    def report(self) -> dict[str, object]:
        """Return the counters as plain values."""
        known = sum(self.accepted.values())
        return {
            "width": self.width,
            "block": self.block,
            "steps": self.steps,
            "request_steps": self.request_steps,
            "plain_request_steps": self.plain_request_steps,
            "nodes": self.nodes,
            "simulated_acceptance": self.simulated_acceptance,
            "acceptance_length": self.tokens / known if known else None,
            "acceptance_lengths": {str(length): self.accepted[length] for length in sorted(self.accepted)},
            "host_seconds": dict(self.seconds),
            "auto": self.choices(),
        }
