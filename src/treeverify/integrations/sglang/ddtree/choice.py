"""Which width the next step verifies, from what the host knows of earlier steps: pure, and alike on every rank.

The rule is that of ``tree.budget``: most expected tokens per millisecond. But the width of a step is chosen before its
draft, so that nothing waits for the device: the drafted path probabilities are averages over the requests and over
recent drafted steps. Whether a step drafts at all follows from what drafting has gained (``tree.budget.Pauses``).
Costs are those measured at the start, corrected by what steps were seen to take in service (``served``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeverify.costs import CostTable
from treeverify.integrations.sglang.ddtree.served import Kind, size_of
from treeverify.tree.budget import RECENT, Calibration, Pauses, rates

LEAST_SHARE = 0.25
"""Of its measured cost that a corrected one keeps at least."""
LEAST_UNSEEN = 0.8
"""Of the shortest step seen in service that one of a width not seen takes at least: the scheduler works in each."""
RUN_MS = 8.0
"""Milliseconds of plain steps in a row that requests who wait, and readers of a text, are kept waiting at most."""


_At = tuple[str, int, int]
"""Mode, requests, context."""


class _Prices(NamedTuple):
    """What steps of some mode, batch and context cost."""

    run: int
    """Plain steps in a row."""
    measured_ms: tuple[float, ...]
    """By rung, the draft included; of rung 0 a whole run."""
    step_ms: NDArray[np.float64]
    """``[widths]``, corrected, the draft included; of rung 0 a step of the run."""
    relative: tuple[float, ...]
    """By rung: the step's time over that of a plain one, which is rung 0."""


class Plan(NamedTuple):
    """What a step was chosen to be."""

    width: int
    """Nodes to verify; 1: plain steps, which verify the root alone without a draft."""
    run: int
    """Plain steps in a row; 1 of any other width."""
    kind: Kind
    requests: int
    measured_ms: float
    """What all of it cost at the start."""
    cost: float
    """The step's time over that of a plain one."""
    promising: bool
    """Whether more tokens per time are expected of it than of a plain one."""


class Choice:
    """Chooses widths for one worker: ``plan`` is asked once per step, ``observe`` told of each outcome in order."""

    def __init__(self, costs: Mapping[str, CostTable], run: int) -> None:
        """``costs``: of each verify mode that may be served; all of one ladder. ``run``: most plain steps in a row."""
        self.ladder = next(iter(costs.values())).widths
        self.widths: Counter[int] = Counter()
        """Steps by width."""
        self._costs, self._run = costs, run
        self._prices: dict[_At, _Prices] = {}
        self._best: dict[_At, int] = {}
        """The drafted rung with the most expected tokens per millisecond, until the expectation changes."""
        self._served: Mapping[Kind, float] = {}
        self._places = np.array(self.ladder) - 1
        self._calibration = Calibration()
        self._pauses: defaultdict[int, Pauses] = defaultdict(Pauses)  # one size of batch says nothing of others
        self._size = 1
        self._mass: NDArray[np.float64] | None = None

    def plan(self, requests: int, context: int, mode: str) -> Plan:
        """The next step, of ``requests`` with ``context`` committed tokens on average."""
        rest = max(0, context.bit_length() - 5)  # contexts are rounded down to five binary digits, by at most a 16th
        at, rung = (mode, requests, context >> rest << rest), 0
        prices = self._prices_of(at)
        self._size = size_of(requests)
        if self._pauses[self._size].drafts():
            rung = 1 if self._mass is None else self._best_of(at, prices.step_ms, self._mass)
        cost = prices.relative[rung]
        promising = self._mass is None or 1 + self._calibration.factor * self._mass[rung] >= cost
        width, run = self.ladder[rung], 1 if rung else prices.run
        self.widths[width] += run
        kind = Kind(mode, self._size, rung)
        return Plan(width, run, kind, requests, prices.measured_ms[rung], cost, bool(promising))

    def correct(self, served: Mapping[Kind, float]) -> None:
        """Take what steps were seen to take beyond the measured costs, in milliseconds by kind."""
        self._served = served
        self._prices.clear()
        self._best.clear()

    def observe(self, plan: Plan, drafts: Sequence[int], probabilities: NDArray[np.float64] | None) -> None:
        """The outcome of a step that drafted.

        ``drafts``: accepted draft tokens of each request. ``probabilities`` float64 [width of the draft]: path
        probabilities of the drafted nodes in their order, the root first, summed over the requests; None of a step
        that was not looked at.
        """
        accepted = sum(drafts) / plan.requests
        self._pauses[plan.kind.size].observe(1 + accepted, plan.cost, plan.promising)
        if probabilities is None:
            return
        below = np.concatenate(([0.0], probabilities[1:].cumsum() / plan.requests))
        mass = below[self._places]
        self._mass = mass if self._mass is None else RECENT * self._mass + (1 - RECENT) * mass
        if mass[plan.kind.rung] > 0:
            self._calibration.observe(accepted, float(mass[plan.kind.rung]))
        self._best.clear()

    def report(self) -> dict[str, object]:
        """The choices so far as plain values."""
        return {
            "ladder": list(self.ladder),
            "widths": {str(width): self.widths[width] for width in self.ladder},
            "calibration": self._calibration.factor,
            "gain": self._pauses[self._size].gain,
            "pauses": sum(pauses.begun for pauses in self._pauses.values()),
            "served_ms": [
                {"mode": kind.mode, "requests": kind.size, "width": self.ladder[kind.rung], "beyond_measured": beyond}
                for kind, beyond in sorted(self._served.items())
            ],
        }

    def _prices_of(self, at: _At) -> _Prices:
        """Costs of all rungs, interpolated and corrected once."""
        found = self._prices.get(at)
        if found is None:
            mode, requests, context = at
            table = self._costs[mode]
            measured, plain_ms = table.step_ms(requests, context), table.plain_ms(requests, context)
            run = max(1, min(self._run, int(RUN_MS / plain_ms)))
            measured[0] = run * plain_ms
            step_ms = np.maximum(measured + self._beyond(measured, mode, size_of(requests)), LEAST_SHARE * measured)
            step_ms[0] /= run
            relative = (1.0, *(float(ms) for ms in step_ms[1:] / step_ms[0]))
            found = self._prices[at] = _Prices(run, tuple(measured.tolist()), step_ms, relative)
        return found

    def _beyond(self, measured: NDArray[np.float64], mode: str, size: int) -> NDArray[np.float64]:
        """Milliseconds beyond the measured costs by rung; a rung that was not seen takes ``LEAST_UNSEEN`` at least.

        The host's time is hidden behind a longer step: if what is not served were taken to be as much dearer as what
        is, it could look worse than it is for ever. If it looks better, it is served, and seen.
        """
        seen = [self._served.get(Kind(mode, size, rung)) for rung in range(len(self.ladder))]
        taken = [ms + beyond for ms, beyond in zip(measured, seen, strict=True) if beyond is not None]
        least = LEAST_UNSEEN * min(taken, default=0.0)
        return np.array([max(0.0, least - ms) if it is None else it for ms, it in zip(measured, seen, strict=True)])

    def _best_of(self, at: _At, step_ms: NDArray[np.float64], mass: NDArray[np.float64]) -> int:
        """Which rung above the first gives the most tokens per millisecond."""
        found = self._best.get(at)
        if found is None:
            found = self._best[at] = 1 + int(np.argmax(rates(mass, step_ms, self._calibration.factor)[1:]))
        return found
