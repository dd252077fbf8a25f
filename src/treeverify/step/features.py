"""The end of a step: accepted features into the drafter's KV, by DFLASH's projection and write, or a graph of them.

A graph of a batch size runs over the first requests of buffers that never move, and serves smaller batches too. What it
then finds beyond the batch must not be an earlier batch's: ``feature_gather`` makes padding of it, and rows of padding
go to slot 0, which nobody reads. Only what runs on one stream touches the buffers, one step after the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from treeverify.ops.feature_gather.api import feature_gather
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.tree_accept.contract import Accepted

Call = Callable[[], None]
Capture = Callable[[Mapping[int, Call]], Mapping[int, Call]]
"""From what each batch size runs to what replays it."""


class Features:
    """Writes the features of a step's accepted nodes where the next draft reads them."""

    def __init__(self, append: Callable[[Gathered], None]) -> None:
        """``append`` writes packed rows into the drafter's KV."""
        self._append = append
        self._like: tuple[int, int, torch.dtype, torch.device] | None = None
        """Columns, dimension, dtype and device of packed rows."""
        self._sizes: list[int] = []
        self._captured: list[tuple[Gathered, Call]] = []

    def __call__(
        self, features: torch.Tensor, accepted: Accepted, slots: torch.Tensor, prefix_lengths: torch.Tensor
    ) -> None:
        """Write those of one batch; arguments as in ``ops.feature_gather``."""
        place = bisect_left(self._sizes, len(slots))
        given = (features, accepted.path, accepted.lengths, slots, prefix_lengths)
        if place == len(self._sizes):
            self._like = accepted.path.shape[1], features.shape[1], features.dtype, features.device
            self._append(feature_gather(*given))
            return
        rows, replay = self._captured[place]
        feature_gather(*given, out=rows)
        replay()

    def capture(self, sizes: Sequence[int], capture: Capture) -> None:
        """From now on replay graphs for batches of up to the largest of ``sizes``.

        After a step without a graph, which shows what is packed.
        """
        assert self._like is not None, "no step has run"
        columns, dim, dtype, device = self._like
        held = Gathered.empty(max(sizes), columns - 1, torch.empty(0, dim, dtype=dtype, device=device))
        for tensor in vars(held).values():
            tensor.zero_()  # captures run too: into slot 0
        rows = {size: Gathered(*(tensor[:size] for tensor in vars(held).values())) for size in sorted(sizes)}
        replays = capture({size: partial(self._append, part) for size, part in rows.items()})
        self._sizes = list(rows)
        self._captured = [(part, replays[size]) for size, part in rows.items()]
