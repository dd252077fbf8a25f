"""``budget="auto"``: the width of each step from measured costs and the drafter's path probabilities.

After a draft the width with the most expected tokens per millisecond is verified (``tree.budget``). Whether a draft is
made at all is decided before it, from what drafting has gained lately: if that is less than plain decoding gives, the
next steps draft nothing, and then one step tries again. All requests of a step share one width and one history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treeverify.costs import CostTable
from treeverify.tree.budget import Calibration, Pauses, choose_width, path_mass


class WidthPolicy(Protocol):
    """Decides for the requests of one step that were submitted with ``budget="auto"``; asked in this order.

    ``context`` is the mean of the requests' committed tokens.
    """

    @property
    def widest(self) -> int:
        """The most nodes that it ever chooses, root included."""

    def drafts(self, batch: int, context: int) -> bool:
        """Whether this step drafts; False makes it a step of plain decoding, and nothing else is asked."""

    def choose(self, scores: Sequence[NDArray[np.float32]], context: int) -> int:
        """The width of this step; ``scores`` float32 [width of its tree] of each request's ``ScoredTree``."""

    def accepted(self, drafts: Sequence[int]) -> None:
        """Draft tokens that each request accepted (root and bonus not counted)."""


class AutoBudget:
    """The policy of measured costs."""

    def __init__(self, costs: CostTable) -> None:
        """Start with trust in the drafter."""
        self.costs = costs
        self.calibration = Calibration()
        self._pauses = Pauses()
        self._mass, self._step_cost = 0.0, 1.0  # of the step that was chosen last

    @property
    def widest(self) -> int:
        """The top of the ladder."""
        return self.costs.widths[-1]

    @property
    def gain(self) -> float:
        """Tokens per time of recent drafted steps over plain decoding's."""
        return self._pauses.gain

    def drafts(self, batch: int, context: int) -> bool:
        """False while drafting does not pay, except for one try after each pause."""
        return self._pauses.drafts()

    def choose(self, scores: Sequence[NDArray[np.float32]], context: int) -> int:
        """The argmax of expected tokens per millisecond; width 1 too has paid for the draft by now."""
        ladder, batch = self.costs.widths, len(scores)
        step_ms = self.costs.step_ms(batch, context)
        width = choose_width(scores, ladder, step_ms.tolist(), self.calibration.factor)
        self._mass = float(np.mean([path_mass(row, [width])[0] for row in scores]))
        self._step_cost = float(step_ms[ladder.index(width)]) / self.costs.plain_ms(batch, context)
        return width

    def accepted(self, drafts: Sequence[int]) -> None:
        """Learn from a step; start a pause if drafting has not paid lately."""
        mean = sum(drafts) / len(drafts)
        if self._mass > 0:
            self.calibration.observe(mean, self._mass)
        self._pauses.observe(1 + mean, self._step_cost)
