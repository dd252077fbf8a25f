"""What steps take in service beyond what they cost when they were measured at the start: the host's clock, no device.

At the start the worker alone was measured. In service the scheduler works beside it, more with more requests, and where
it does not keep ahead of the device its time is part of each step's. A step's time is taken from its launch to the next
one's, and counts if the two before it were of its kind: then whatever is still under way on the device is alike, and
nothing but decoding went on in between.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median
from typing import NamedTuple

KEPT = 32
"""Latest steps of a kind, of which the median counts."""
LEAST = 4
"""Steps of a kind that must have been seen before it counts as seen."""
FORGOTTEN = 256
"""Steps after which a kind that was not seen again is forgotten: a busy second must not decide for ever."""
_ALIKE = 3


class Kind(NamedTuple):
    """Steps that are alike."""

    mode: str
    size: int
    """Power of two that the requests are rounded up to."""
    rung: int
    """Place of the width in the ladder."""


def size_of(requests: int) -> int:
    """The least power of two that is at least ``requests``."""
    return 1 << (requests - 1).bit_length()


class Clock:
    """Times the steps of one worker."""

    def __init__(self) -> None:
        """No step was seen yet."""
        self._excess: defaultdict[Kind, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._seen: dict[Kind, int] = {}
        self._steps = 0
        self._last: Kind | None = None
        self._alike, self._begun, self._measured = 0, 0.0, 0.0

    def end(self, now: float) -> bool:
        """The last step ends at ``now`` seconds, where the next one is chosen; True if its kind counts as seen now.

        Alike on every rank, as the steps are, but for the times.
        """
        self._steps += 1
        if self._alike < _ALIKE or self._last is None:
            return False
        found = self._excess[self._last]
        found.append(1e3 * (now - self._begun) - self._measured)
        self._seen[self._last] = self._steps
        return len(found) == LEAST

    def begin(self, kind: Kind, measured_ms: float, now: float) -> None:
        """A step is about to be launched at ``now`` seconds; ``measured_ms`` is what it cost at the start."""
        self._alike = self._alike + 1 if kind == self._last else 1
        self._last, self._begun, self._measured = kind, now, measured_ms

    def interrupt(self) -> None:
        """Something else than decoding goes on: what is under way is not counted."""
        self._last, self._alike = None, 0

    def medians(self) -> dict[Kind, float]:
        """Milliseconds beyond the measured ones by kind, of kinds that were seen of late."""
        for kind in [kind for kind, step in self._seen.items() if self._steps - step > FORGOTTEN]:
            del self._seen[kind], self._excess[kind]
        return {kind: median(found) for kind, found in self._excess.items() if len(found) >= LEAST}
