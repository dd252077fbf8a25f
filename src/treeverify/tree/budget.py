"""How wide a tree pays: expected tokens per millisecond over a ladder of widths. Pure numpy.

A node is accepted if the target takes its whole path, so the expected acceptance length of a tree is 1 (the bonus
token) plus the sum of its nodes' path probabilities. A best-first tree of a smaller width is a prefix of a wider one,
and no tree of the same width, the chain included, has a larger sum. The rule (arXiv 2606.01813): take the width at
which expected tokens over the step's time, draft and verify, is largest.

The drafter's path probabilities come from marginals and are not the target's. ``Calibration`` learns one factor for
their sum from what is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import ContractError
from treeverify.tree._arrays import require_array

LEAST, MOST = 0.25, 4.0
"""Bounds of the calibration factor: a drafter further off than this is not worth more trust in its probabilities."""
DECAY = 0.97
"""Weight of the past in the calibration's exponential averages, per step: about the last 33 steps count."""
RECENT = 0.9
"""Weight of the past in the averages of gain, per step that drafted: about the last ten count."""
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 128
"""Steps without a draft before the next try; a pause after a try that did not pay is twice as long."""


def path_mass(scores: NDArray[np.float32], ladder: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Sum of drafted path probabilities of the first ``w`` nodes without the root, float64 [len(ladder)].

    ``scores`` float32 [width] are those of ``ScoredTree``; a ladder width beyond the tree counts the whole tree.
    Raises ContractError for other scores: no root of score 0, NaN, or a positive one.
    """
    scores = require_array("path_mass", "scores", scores, (np.float32,), ndim=1)
    if scores.size == 0 or scores[0] != 0 or not (scores <= 0).all():
        raise ContractError.of("path_mass", "scores", "0 for the root, then values <= 0", scores.tolist()[:8])
    sums: NDArray[np.float64] = np.cumsum(np.exp(scores.astype(np.float64))) - 1.0
    found: NDArray[np.float64] = sums[np.minimum(np.asarray(ladder), scores.size) - 1]
    return found


def choose_width(
    scores: Sequence[NDArray[np.float32]], ladder: Sequence[int], step_ms: Sequence[float], factor: float = 1.0
) -> int:
    """The width of ``ladder`` with the most expected tokens per millisecond, for a batch verified in one call.

    ``scores``: float32 [width of its tree] for each request, at least one. ``ladder``: rising widths, the first is 1
    (the root alone). ``step_ms``: positive, one for each ladder width, draft included. ``factor`` > 0 multiplies the
    sum of path probabilities. Never a width above 1 that is wider than every tree; equal rates: the smaller width.
    Raises ContractError for anything else.
    """
    widths = check_ladder("choose_width", ladder)
    if not scores:
        raise ContractError.of("choose_width", "scores", "at least one request", "none")
    mass = np.mean([path_mass(row, widths) for row in scores], axis=0)
    found = np.where(widths <= max(row.size for row in scores), rates(mass, step_ms, factor), -np.inf)
    return int(widths[np.argmax(found)])  # the first of equal ones


def rates(
    mass: NDArray[np.float64], step_ms: Sequence[float] | NDArray[np.float64], factor: float = 1.0
) -> NDArray[np.float64]:
    """Expected tokens of a request per millisecond at each width, float64 [widths].

    ``mass`` float64 [widths]: the mean of the requests' ``path_mass``. ``step_ms``: positive, one for each width.
    ``factor`` > 0 multiplies the mass. Raises ContractError for anything else.
    """
    costs = np.asarray(step_ms, dtype=np.float64)
    if costs.shape != mass.shape or not (np.isfinite(costs) & (costs > 0)).all():
        raise ContractError.of("budget", "step_ms", f"{mass.size} positive numbers", costs.tolist())
    if not (np.isfinite(factor) and factor > 0):
        raise ContractError.of("budget", "factor", "> 0", factor)
    found: NDArray[np.float64] = (1.0 + factor * mass) / costs
    return found


def check_ladder(operator: str, ladder: Sequence[int]) -> NDArray[np.int64]:
    """The ladder int64 [n]; ContractError unless its widths rise and the first is 1."""
    widths = np.asarray(ladder)
    if widths.ndim != 1 or widths.size == 0 or widths.dtype.kind not in "iu" or widths[0] != 1:
        raise ContractError.of(operator, "ladder", "widths that begin with 1", list(ladder))
    if not (np.diff(widths) > 0).all():
        raise ContractError.of(operator, "ladder", "rising widths", list(ladder))
    return widths.astype(np.int64)


class Calibration:
    """What the drafter's path probabilities are worth: accepted drafts over those expected, exponentially averaged.

    Both averages start at 1, so the factor starts at 1, and it stays in [``LEAST``, ``MOST``].
    """

    def __init__(self) -> None:
        """Start with trust in the drafter."""
        self._accepted = self._expected = 1.0

    @property
    def factor(self) -> float:
        """The factor of the sum of path probabilities."""
        return min(MOST, max(LEAST, self._accepted / self._expected))

    def observe(self, accepted: float, expected: float) -> None:
        """One step's accepted draft tokens (root and bonus not counted) and its sum of drafted path probabilities.

        Both of the verified tree, means over the batch. ContractError unless finite and >= 0.
        """
        if not (np.isfinite(accepted) and np.isfinite(expected) and accepted >= 0 and expected >= 0):
            raise ContractError.of("Calibration", "accepted, expected", "finite, >= 0", f"{accepted}, {expected}")
        self._accepted = DECAY * self._accepted + (1 - DECAY) * accepted
        self._expected = DECAY * self._expected + (1 - DECAY) * expected


class Pauses:
    """Whether drafting pays at all: if it has not of late, the next steps draft nothing, and then one tries again.

    What drafting had gained before a pause is forgotten by then: a try is judged against plain decoding alone, or one
    unlucky stretch would outlast many tries.
    """

    def __init__(self) -> None:
        """Start with trust in drafting."""
        self.begun = 0
        """Pauses so far."""
        self._tokens, self._cost = 2.0, 1.0  # averages per drafted step: tokens of a request, time over a plain step's
        self._next, self._left = SHORTEST_PAUSE, 0
        self._tries = self._waits = False

    @property
    def gain(self) -> float:
        """Tokens per time of recent drafted steps over plain decoding's."""
        return self._tokens / self._cost

    def drafts(self) -> bool:
        """Whether the next step drafts; asked once for each step.

        The step after a try waits for its outcome, if that has not come yet, but no further step does.
        """
        if self._left > 0:
            self._left -= 1
            if self._left == 0:
                self._tokens, self._tries = self._cost, True
            return False
        if self._waits:
            self._waits = False
            return False
        self._tries, self._waits = False, self._tries
        return True

    def observe(self, tokens: float, cost: float, promising: bool = False) -> None:
        """One drafted step: tokens per request, and its time over that of a plain step.

        ``promising``: more was expected of it than of a plain step, which forbids a pause. A step that was launched
        before a pause began may be observed in it: it counts, but begins no further pause.
        """
        self._tokens = RECENT * self._tokens + (1 - RECENT) * tokens
        self._cost = RECENT * self._cost + (1 - RECENT) * cost
        self._waits = False
        if self._left > 0:
            return
        if self.gain >= 1:
            self._next = SHORTEST_PAUSE
        elif not promising:
            self._left, self._next = self._next, min(2 * self._next, LONGEST_PAUSE)
            self.begun += 1
