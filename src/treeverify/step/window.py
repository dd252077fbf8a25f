"""The slots of one step: where its nodes' KV rows are written, behind each request's committed tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from treeverify.ops.draft_window.contract import DraftWindow


class Window(NamedTuple):
    """The slots of one step, and what the host knows of the lengths."""

    slots: torch.Tensor
    """``[batch, width]`` int64: the reserved slots behind each request's committed tokens."""
    lengths: torch.Tensor
    """``[batch]`` int64: committed tokens, the root not among them."""
    bounds: torch.Tensor
    """``[batch]`` int32 on the host, at least ``lengths``."""
    bound: int
    """Their sum."""
    block: DraftWindow
    """The drafter's input, roots in front, and its slots."""
    plan: Any = None
    """What the host has planned for these slots, if it plans any."""
    columns: slice | None = None
    """The part of the plan's window that these slots are; None: all of it."""

    def front(self, width: int) -> Window:
        """The window of each request's first ``width`` slots."""
        if width == self.slots.shape[1]:
            return self
        own = self.block.block_slots
        slots = own if width == own.shape[1] else self.slots[:, :width].contiguous()
        return self._replace(slots=slots, columns=slice(0, width))

    def each(self, lengths: torch.Tensor) -> list[Window]:
        """Windows of one slot each, one after the other, as ``lengths [count, batch]`` grow."""
        slots = self.slots[:, : len(lengths)].t().contiguous().unsqueeze(-1)
        return [
            self._replace(slots=slots[place], lengths=lengths[place], columns=slice(place, place + 1))
            for place in range(len(lengths))
        ]
