"""Who runs and who waits: first in, first out; the youngest gives way when memory runs out. Pure bookkeeping.

A request is admitted when its prompt and the nodes of one step fit into the free slots, and never before one that was
submitted earlier. Where slots are short, steps verify fewer nodes, down to the root alone. When a running request does
not get a slot for its root either, the youngest running request is *retracted*: its slots are taken, it goes back to
the head of the queue, and its KV rows are computed again from its tokens when it returns. Tokens already given out
stay. The oldest request always advances, and every admitted request fits when it is alone and nothing is drafted (the
engine refuses others), so all of them end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treeverify.engine.request import FinishReason, Request
from treeverify.errors import ContractError

Grow = Callable[[Request, int, int], bool]
Release = Callable[[Request, int], None]


class Scheduler:
    """The waiting queue and the running list, both in order of submission (oldest first)."""

    def __init__(self, max_batch: int, grow: Grow, release: Release) -> None:
        """``grow(request, least, most)`` gets slots or returns False; ``release(request, keep)`` takes others back."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._max_batch, self._grow, self._release = max_batch, grow, release
        self._retractions = 0
        self._stepping = False
        self._aborted: list[Request] = []  # in this step, which has their rows in hand

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
            if not self._grow(head, head.slots_wanted, head.slots_wanted):
                return
            self.running.append(self.waiting.popleft())

    def reserve(self) -> list[Request]:
        """Get each decoding request the slots of its next step, oldest first; returns those that have them.

        Each gets one for its root, if need be from the drafts of others, or else by retracting youngest requests. What
        is left then goes to their drafts.
        """
        decoding = [request for request in self.running if request.decoding]
        for request in decoding:
            while request in self.running and not self._grow(request, request.slots_needed, request.slots_needed):
                self._make_room()
        ready = [request for request in decoding if request in self.running]
        for request in ready:
            self._grow(request, request.slots_needed, request.slots_wanted)
        return ready

    def take_retractions(self) -> int:
        """Retractions since the last call."""
        count, self._retractions = self._retractions, 0
        return count

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step is under way; what is aborted meanwhile ends with it. ContractError inside another one."""
        self.check_idle("step")
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            for request in self.requests:
                self.advanced(request)  # also where an error kept the step from saying so
            self._aborted.clear()

    def check_idle(self, call: str) -> None:
        """ContractError for a call from inside a step."""
        if self._stepping:
            raise ContractError.of("engine", call, "to be called between steps", "a call from a callback inside one")

    def abort(self, request: Request) -> None:
        """End a request that has not ended: now, or with the step that it is in."""
        if self._stepping and request in self.running:
            self._aborted.append(request)
        else:
            self._end(request, FinishReason.ABORT)

    def advanced(self, request: Request) -> None:
        """A request has got its step's tokens: it ends if it has finished, or was aborted meanwhile."""
        finish = request.finish or (FinishReason.ABORT if request in self._aborted else None)
        if finish is not None:
            self._end(request, finish)

    def _end(self, request: Request, finish: FinishReason) -> None:
        """Forget a request, and take its slots back."""
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        request.finish = finish
        self._release(request, 0)

    def _make_room(self) -> None:
        """Take back the slots of the youngest draft, or where there is none, retract the youngest request."""
        drafted = [request for request in self.running if request.owned > request.slots_needed]
        if drafted:
            self._release(drafted[-1], drafted[-1].slots_needed)
        else:
            self._retract(self.running[-1])

    def _retract(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request, 0)
        request.rewind()
        self._retractions += 1
        self.waiting.appendleft(request)
