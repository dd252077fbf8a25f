"""Milliseconds of a server's own steps by verify mode, width, batch and context, measured at its start.

Each point runs whole steps of the worker (draft, tree, verify, accept, commit) over requests that are not there
(``graphs.Rehearsal``), through the captured graphs where there are any, between two CUDA events; on a CPU the clock is
that of the calling thread. Widths take turns and the least of the rounds counts, as in ``bench.step_costs``; the same
cache keeps the tables. All ranks measure together; rank 0's table is everybody's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from time import thread_time
from typing import Any

import numpy as np
import torch

import treeverify
from treeverify.costs import CostCache, CostTable
from treeverify.env import VerifyMode
from treeverify.integrations.sglang import modes
from treeverify.integrations.sglang.ddtree import graphs
from treeverify.integrations.sglang.names import version

Step = Callable[[graphs.Rehearsal, int], None]
"""step(batch, width): one step; of width 0: its draft alone; of width 1: a run of plain steps."""
_BATCHES, _CONTEXTS = (1, 4, 16), (1024, 32768)
_SMALL_CONTEXT = 64
"""Of a CPU, which runs a small model slowly."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    widths: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    rounds: int
    steps: int
    """In a row, for each measurement."""
    run: int
    """Plain steps in what is run for width 1."""

    @property
    def points(self) -> int:
        """Batches times contexts."""
        return len(self.batches) * len(self.contexts)


def grid_of(ladder: tuple[int, ...], run: int, batches: list[int], room: int, cuda: bool) -> Grid:
    """The grid of a server that has graphs of ``batches``, and ``room`` for the tokens of one request."""
    longest = max(1, room - ladder[-1])
    if not cuda:
        return Grid(ladder, (1,), (min(_SMALL_CONTEXT, longest),), rounds=1, steps=1, run=run)
    most = batches[-1]
    counts = tuple(sorted({batch for batch in _BATCHES if batch < most} | {most}))
    return Grid(ladder, counts, tuple(sorted({min(c, longest) for c in _CONTEXTS})), rounds=10, steps=2, run=run)


def costs_of(worker: Any, ladder: tuple[int, ...], run: int, step: Step) -> dict[str, CostTable]:
    """Tables by verify mode, of every mode that may be served: from rank 0's cache, or measured now by all ranks."""
    cuda = torch.device(worker.device).type == "cuda"
    grid = grid_of(ladder, run, graphs.captured_batches(worker), graphs.room(worker), cuda)
    found = {}
    for mode in modes.current().allowed:
        cache = CostCache(_key(worker, grid, mode))
        held = graphs.from_first_rank(cache.load() if graphs.is_first_rank() else None)
        if held is None:
            held = graphs.from_first_rank(_measure(worker, grid, mode, step))
            if graphs.is_first_rank():
                cache.store(held)
        else:
            logger.info("treeverify: step costs of mode %s from %s", mode, cache.path)
        found[str(mode)] = held
    return found


def _key(worker: Any, grid: Grid, mode: VerifyMode) -> dict[str, object]:
    cuda = torch.device(worker.device).type == "cuda"
    return {
        "where": torch.cuda.get_device_name(worker.device) if cuda else "cpu",
        "torch": torch.__version__,
        "sglang": version(),
        "version": treeverify.__version__,
        "server": graphs.description(worker),
        "mode": str(mode),
        "grid": {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(grid).items()},
    }


def _measure(worker: Any, grid: Grid, mode: VerifyMode, step: Step) -> CostTable:
    total = np.empty((len(grid.widths), len(grid.batches), len(grid.contexts)))
    draft = np.empty(total.shape[1:])
    clock = _device_ms if torch.device(worker.device).type == "cuda" else _thread_ms
    done = 0
    with modes.current().capture(mode), torch.no_grad():
        for b, batch in enumerate(grid.batches):
            for c, context in enumerate(grid.contexts):
                with graphs.rehearsal(worker, batch, context) as requests:
                    found = _rounds(grid, clock, partial(step, requests))
                draft[b, c], total[:, b, c] = found[0], found[1:]
                done += 1
                logger.log(
                    logging.INFO if graphs.is_first_rank() else logging.DEBUG,
                    "treeverify: step costs, %s, %d%%: batch %d, context %d: draft %.3f ms, steps of %s nodes %s ms",
                    mode,
                    100 * done // grid.points,
                    batch,
                    context,
                    found[0],
                    grid.widths,
                    np.round(found[1:], 3).tolist(),
                )
    verify = total - np.where(np.array(grid.widths) > 1, 1.0, 0.0)[:, None, None] * draft
    return CostTable(grid.widths, grid.batches, grid.contexts, np.maximum(verify, 1e-6), draft)


def _rounds(grid: Grid, clock: Callable[[Callable[[], None]], float], run: Callable[[int], None]) -> Any:
    """Least milliseconds [1 + widths]: the draft alone, then a step of each width. The first round warms up.

    That of width 1 is one of its run.
    """
    found = np.full(1 + len(grid.widths), np.inf)
    for turn in range(grid.rounds + 1):
        for place, width in enumerate((0, *grid.widths)):

            def several(width: int = width) -> None:
                for _ in range(grid.steps):
                    run(width)

            taken = clock(several) / (grid.steps * (grid.run if width == 1 else 1))
            if turn > 0:
                found[place] = min(found[place], taken)
    return found


def _device_ms(run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _thread_ms(run: Callable[[], None]) -> float:
    begin = thread_time()
    run()
    return 1e3 * (thread_time() - begin)
