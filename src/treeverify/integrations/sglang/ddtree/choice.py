"""Which width the next step verifies, from what the host knows of earlier steps: pure, and alike on every rank.

The rule is that of ``tree.budget``: most expected tokens per millisecond. But the width of a step is chosen before its
draft, so that nothing waits for the device: the drafted path probabilities are averages over the requests and over
recent drafted steps. Whether a step drafts at all follows from what drafting has gained (``tree.budget.Pauses``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeverify.engine.costs import CostTable
from treeverify.tree.budget import RECENT, Calibration, Pauses, rates


class _Prices(NamedTuple):
    """What steps of some batch and context cost."""

    step_ms: NDArray[np.float64]
    """``[widths]``, the draft included."""
    relative: tuple[float, ...]
    """By rung: the step's time over that of a plain one, which is rung 0."""


class Plan(NamedTuple):
    """What a step was chosen to be."""

    width: int
    """Nodes to verify; 1: the root alone, and no draft."""
    rung: int
    """The width's place in the ladder."""
    requests: int
    cost: float
    """The step's time over that of a plain one."""
    promising: bool
    """Whether more tokens per time are expected of it than of a plain one."""


class Choice:
    """Chooses widths for one worker: ``plan`` is asked once per step, ``observe`` told of each outcome in order."""

    def __init__(self, costs: Mapping[str, CostTable]) -> None:
        """``costs``: of each verify mode that may be served; all of one ladder."""
        self.ladder = next(iter(costs.values())).widths
        self.widths: Counter[int] = Counter()
        """Steps by width."""
        self._costs = costs
        self._prices: dict[tuple[str, int, int], _Prices] = {}
        self._places = np.array(self.ladder) - 1
        self._calibration, self._pauses, self._ended = Calibration(), Pauses(), 0
        self._mass: NDArray[np.float64] | None = None
        self._batch = 0

    def plan(self, requests: int, context: int, mode: str) -> Plan:
        """The next step, of ``requests`` with ``context`` committed tokens on average."""
        if not self._batch < 2 * requests < 4 * self._batch:  # a pause says nothing of half or twice as many requests
            self._ended += self._pauses.begun
            self._batch, self._pauses = requests, Pauses()
        prices, rung = self._prices_of(requests, context, mode), 0
        if self._pauses.drafts():
            rung = 1 if self._mass is None else 1 + self._best(prices.step_ms)
        cost = prices.relative[rung]
        promising = self._mass is None or 1 + self._calibration.factor * self._mass[rung] >= cost
        self.widths[self.ladder[rung]] += 1
        return Plan(self.ladder[rung], rung, requests, cost, bool(promising))

    def observe(self, plan: Plan, drafts: Sequence[int], probabilities: NDArray[np.float64]) -> None:
        """The outcome of a step that drafted.

        ``drafts``: accepted draft tokens of each request. ``probabilities`` float64 [width of the draft]: path
        probabilities of the drafted nodes in their order, the root first, summed over the requests.
        """
        below = np.concatenate(([0.0], probabilities[1:].cumsum() / plan.requests))
        mass = below[self._places]
        self._mass = mass if self._mass is None else RECENT * self._mass + (1 - RECENT) * mass
        accepted = sum(drafts) / plan.requests
        if mass[plan.rung] > 0:
            self._calibration.observe(accepted, float(mass[plan.rung]))
        self._pauses.observe(1 + accepted, plan.cost, plan.promising)

    def report(self) -> dict[str, object]:
        """The choices so far as plain values."""
        return {
            "ladder": list(self.ladder),
            "widths": {str(width): self.widths[width] for width in self.ladder},
            "calibration": self._calibration.factor,
            "gain": self._pauses.gain,
            "pauses": self._ended + self._pauses.begun,
        }

    def _prices_of(self, requests: int, context: int, mode: str) -> _Prices:
        """Costs at ``context`` rounded down to five binary digits, by at most a 16th; each is interpolated once."""
        rest = max(0, context.bit_length() - 5)
        context = context >> rest << rest
        found = self._prices.get((mode, requests, context))
        if found is None:
            table = self._costs[mode]
            step_ms, plain_ms = table.step_ms(requests, context), table.plain_ms(requests, context)
            found = _Prices(step_ms, (1.0, *(float(ms) / plain_ms for ms in step_ms[1:])))
            self._prices[mode, requests, context] = found
        return found

    def _best(self, step_ms: NDArray[np.float64]) -> int:
        """Which rung above the first gives the most tokens per millisecond, counted from there."""
        assert self._mass is not None
        return int(np.argmax(rates(self._mass, step_ms, self._calibration.factor)[1:]))
