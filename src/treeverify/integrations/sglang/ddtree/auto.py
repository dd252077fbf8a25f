"""``KDTREE_BUDGET=auto`` in the worker: graphs of each width, measured costs, and the width of each step.

Nothing waits for the device, and every rank decides alike. A step's drafted path scores are copied to pinned
memory behind its draft. They are looked at when SGLang hands in the
accepted lengths of that very step (``on_verify_complete_cpu``): by then it has waited for a copy of its own that was
issued later on the same stream. So each rank sees the numbers of a step at the same place among its steps, and the
numbers are the same: the ranks hold one tree. Costs are rank 0's, and so are the times of served steps, which the ranks
exchange once in ``EVERY`` steps, and where a kind of steps has just been seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treeverify.integrations.sglang import modes
from treeverify.integrations.sglang.ddtree import graphs
from treeverify.integrations.sglang.ddtree.choice import Choice, Plan
from treeverify.integrations.sglang.ddtree.costs import Step, costs_of
from treeverify.integrations.sglang.ddtree.served import Clock

EVERY = 32
"""Steps between corrections of the costs, at most."""
LOOK = 4
"""Steps between drafts whose scores are looked at; the accepted lengths of all are."""
_AHEAD = 2
"""Steps whose outcome is not known yet: overlap scheduling launches one before it looks at the last one's."""


class Auto:
    """Widths by cost for one worker."""

    def __init__(self, worker: Any, ladder: tuple[int, ...], run: int) -> None:
        """``ladder``: rising widths from 1 to that of the draft. ``run``: most plain steps in a row."""
        self.ladder, self.run = ladder, run
        self._worker = worker
        self._clock, self._steps, self._looked = Clock(), 0, -LOOK
        self._graphs: dict[int, Any] = {}
        self._choice: Choice | None = None
        self._launched: deque[tuple[Plan, _Scores | None]] = deque(maxlen=_AHEAD)
        self._free = deque(_Scores(ladder[-1], torch.device(worker.device)) for _ in range(_AHEAD + 1))
        self._unmatched = 0

    def prepare(self, step: Step) -> None:
        """Capture the graphs of all widths and get the costs; ``step`` runs one step of a rehearsal."""
        self._graphs = graphs.capture(self._worker, self.ladder)
        self._choice = Choice(costs_of(self._worker, self.ladder, self.run, step), self.run)

    def plan(self, batch: Any) -> Plan:
        """Choose what the next step is, which is that of ``batch``."""
        assert self._choice is not None
        self._steps += 1
        now = perf_counter()
        if self._clock.end(now) or self._steps % EVERY == 0:
            self._choice.correct(graphs.from_first_rank(self._clock.medians()))
        context = sum(req.seqlen for req in batch.reqs) // len(batch.reqs)
        plan = self._choice.plan(len(batch.reqs), max(1, context), modes.current().mode)
        self._clock.begin(plan.kind, plan.measured_ms, now)
        self._launched.append((plan, None))
        return plan

    def interrupt(self) -> None:
        """The worker does something else than decoding."""
        self._clock.interrupt()

    def use(self, width: int) -> None:
        """Let the next verify replay the graphs of ``width``."""
        graphs.use(self._worker, self._graphs, width)

    def drafted(self, scores: torch.Tensor) -> None:
        """Send what the step just planned has drafted to the host: ``scores`` float32 [batch, width of the draft].

        Not of every step: it takes the host longer than all else that the choice does.
        """
        if self._steps - self._looked < LOOK:
            return
        self._looked = self._steps
        plan, _ = self._launched.pop()
        held = self._free[0]
        self._free.rotate(-1)
        held.start(scores)
        self._launched.append((plan, held))

    def verified(self, drafts: Sequence[int]) -> bool:
        """Learn from the oldest step whose outcome was not known: accepted draft tokens of each request.

        Returns whether it was one of plain steps, whose tokens but one look like accepted drafts.
        """
        plan, scores = self._launched.popleft() if self._launched else (None, None)
        if plan is None or plan.requests != len(drafts):
            self._unmatched += 1  # the outcome of another step: nothing is learned until they match again
            self._launched.clear()
            return False
        if plan.width > 1:
            assert self._choice is not None
            self._choice.observe(plan, drafts, None if scores is None else scores.sums())
        return plan.width == 1

    def report(self) -> dict[str, object] | None:
        """The choices so far as plain values; None before there are costs."""
        return None if self._choice is None else self._choice.report() | {"unmatched": self._unmatched}


class _Scores:
    """The scores of a batch's trees on their way to the host."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host = torch.empty(0, width, pin_memory=self._cuda)
        self._requests = 0
        self._arrived = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]

    def start(self, scores: torch.Tensor) -> None:
        self._requests = len(scores)
        if self._requests > len(self._host):
            self._host = torch.empty(scores.shape, pin_memory=self._cuda)
        self._host[: self._requests].copy_(scores, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def sums(self) -> NDArray[np.float64]:
        """Path probabilities by node, summed over the batch, float64 [width].

        SGLang has waited for something later on the same stream, so this does not wait.
        """
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            self._arrived.synchronize()
        found: NDArray[np.float64] = np.exp(self._host.numpy()[: self._requests], dtype=np.float64).sum(0)
        return found
