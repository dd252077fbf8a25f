"""Milliseconds of real engine steps by width, batch and context, for ``budget="auto"``; ``costs.CostCache`` keeps them.

Each point is a step of an engine of its own over random prompts, through the code that ``auto`` runs: draft, tree, cut
to the width, verify, accept, commit. On a CPU the clock is that of the calling thread, which stops while other
processes run; on a GPU it is the wall's. Widths take turns, so that a busy machine slows all of them alike, and the
least of the rounds counts, since other work only ever adds. A context grows by the tokens that the steps commit, which
the grid ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time

import numpy as np
from numpy.typing import NDArray

from treeverify.costs import CostCache, CostTable
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.protocols import Drafter, Target
from treeverify.engine.request import SamplingParams
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError


@dataclass(frozen=True)
class Grid:
    """What is measured. A ladder's first width is 1; contexts that leave no room for the steps are left out."""

    widths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 10, 13, 17, 25, 33)
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (64, 256, 1024)
    rounds: int = 7

    def points(self) -> int:
        """Calls of ``advance``."""
        return len(self.batches) * len(self.contexts) * self.rounds


class _Forced:
    """A ``WidthPolicy`` that does as it is told, width 1 without a draft, and times the way to a tree."""

    def __init__(self, widest: int, clock: Callable[[], float]) -> None:
        self.widest, self.width, self.drafted = widest, 1, 0.0
        self._clock, self._began = clock, 0.0

    def drafts(self, batch: int, context: int) -> bool:
        self._began, self.drafted = self._clock(), 0.0
        return self.width > 1

    def choose(self, scores: Sequence[NDArray[np.float32]], context: int) -> int:
        self.drafted = self._clock() - self._began
        return self.width

    def accepted(self, drafts: Sequence[int]) -> None:
        pass


def measure(
    target: Target,
    drafter: Drafter,
    verify: VerifyMode,
    grid: Grid,
    advance: Callable[[str], None] = lambda _: None,
) -> CostTable:
    """Measure every point; ``advance`` is told of each round done. ConfigError if no context has room."""
    room = (grid.rounds + 1) * len(grid.widths) * (drafter.depth + 1) + drafter.depth + 2
    contexts = tuple(context for context in grid.contexts if context + room <= target.context)
    if not contexts:
        raise ConfigError(
            f"costs: no context of {list(grid.contexts)} leaves {room} of the model's {target.context} tokens"
        )
    shape = (len(grid.widths), len(grid.batches), len(contexts))
    times, drafts = np.empty(shape), np.empty(shape[1:])
    for b, batch in enumerate(grid.batches):
        for c, context in enumerate(contexts):
            found = []
            for row in _rounds(target, drafter, verify, grid, (batch, context, room)):
                found.append(row)
                advance(f"step costs, batch {batch}, context {context}")
            for w in range(len(grid.widths)):
                times[w, b, c] = min(each[w][0] - each[w][1] for each in found)
            drafts[b, c] = min(each[w][1] for each in found for w in range(1, len(grid.widths)))
    return CostTable(grid.widths, grid.batches, contexts, times, drafts)


def _rounds(
    target: Target, drafter: Drafter, verify: VerifyMode, grid: Grid, case: tuple[int, int, int]
) -> Iterator[list[tuple[float, float]]]:
    """For each measured round, milliseconds (step, its draft and tree) by width; case: batch, context, room."""
    batch, context, room = case
    clock = thread_time if target.device.type == "cpu" else perf_counter
    forced = _Forced(grid.widths[-1], clock)
    slots = batch * (context + room + grid.widths[-1])
    engine = Engine(target, drafter, config=EngineConfig(slots=slots, max_batch=batch, verify=verify), policy=forced)
    rng = np.random.default_rng(context)
    params = SamplingParams(max_new_tokens=room, stop_token_ids=())
    for _ in range(batch):
        engine.submit(rng.integers(0, target.vocab_size, context).tolist(), params, budget="auto")
    while engine.metrics.steps == 0 or engine.metrics.prefill_tokens < batch * context:
        engine.step()
    for turn in range(grid.rounds + 1):
        row = []
        for width in grid.widths:
            forced.width = width
            began = clock()
            engine.step()
            row.append((1e3 * (clock() - began), 1e3 * forced.drafted))
        if turn > 0:  # the first warms up
            yield row


def load_or_measure(cache: CostCache, measured: Callable[[], CostTable]) -> CostTable:
    """The cached table, or what ``measured`` returns, which is then stored."""
    found = cache.load()
    if found is None:
        found = measured()
        cache.store(found)
    return found
