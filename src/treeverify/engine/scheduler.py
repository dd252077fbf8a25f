"""Who runs and who waits: first in, first out; the youngest gives way when memory runs out. Pure bookkeeping.

A request is admitted when its prompt and the nodes of one step fit into the free slots, and never before one that was
submitted earlier. When a running request cannot get the slots of its next step, the youngest running request is
*retracted*: its slots are taken, it goes back to the head of the queue, and its KV rows are computed again from its
tokens when it returns. Tokens already given out stay. The oldest request always advances, and every admitted request
fits when alone (the engine refuses others), so all of them end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from treeverify.engine.request import Request

Grow = Callable[[Request, int], bool]
Release = Callable[[Request], None]


class Scheduler:
    """The waiting queue and the running list, both in order of submission (oldest first)."""

    def __init__(self, max_batch: int, grow: Grow, release: Release) -> None:
        """``grow(request, total)`` gets slots or returns False; ``release`` takes all of a request's slots back."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._max_batch, self._grow, self._release = max_batch, grow, release
        self._retractions = 0

    @property
    def requests(self) -> list[Request]:
        """Every request that has not ended, running ones first."""
        return [*self.running, *self.waiting]

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self) -> None:
        """Move requests from the head of the queue to the running list for as long as they fit."""
        while self.waiting and len(self.running) < self._max_batch:
            head = self.waiting[0]
            if not self._grow(head, head.slots_to_start):
                return
            self.running.append(self.waiting.popleft())

    def reserve(self) -> list[Request]:
        """Get each decoding request the slots of its next step, oldest first; returns those that have them.

        Retracts youngest requests until the others fit.
        """
        ready: list[Request] = []
        for request in list(self.running):
            if not request.decoding:
                continue
            while request in self.running and not self._grow(request, request.committed + request.width):
                self._retract(self.running[-1])
            if request in self.running:
                ready.append(request)
        return ready

    def take_retractions(self) -> int:
        """Retractions since the last call."""
        count, self._retractions = self._retractions, 0
        return count

    def end(self, request: Request) -> None:
        """Forget a request that has finished or was aborted, and take its slots back."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)

    def _retract(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.rewind()
        self._retractions += 1
        self.waiting.appendleft(request)
