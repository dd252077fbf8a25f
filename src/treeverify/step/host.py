"""What a step asks of who serves it. Tensors are on the host's device; nothing here waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.kv_compact.contract import PoolTable
from treeverify.ops.tree_accept.contract import Accepted, LawTensors
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.ops.tree_mask.contract import TreeMasks
from treeverify.step.window import Window

Batch = TypeVar("Batch", contravariant=True)
"""The host's batch of a decode step: opaque to the step."""
Result = TypeVar("Result", covariant=True)
"""What the host makes of a step."""


class Verified(NamedTuple):
    """What a forward of the target over all nodes gave."""

    logits: torch.Tensor
    """``[batch*width, vocab]``, the row after each node."""
    features: torch.Tensor | None
    """``[batch*width, dim]``: what the drafter reads of each node; None if nobody will draft."""
    output: Any
    """The host's own account of the forward."""


@dataclass(frozen=True)
class Outcome:
    """A step that is over, as its host is told of it; of a run, the chain that it looks like."""

    width: int
    """Nodes of each request."""
    trees: DraftTrees | None
    """What was verified; None of a run of plain steps."""
    verified: Verified
    """Of the last forward."""
    accepted: Accepted
    lengths: torch.Tensor
    """``[batch]`` int64: committed tokens from now on, the next root not among them."""


class Host(Protocol[Batch, Result]):
    """Who serves the step: it owns models, pools and requests."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    def open(self, batch: Batch, drafts: bool) -> Window:
        """Find the slots that were reserved for this step, with the drafter's block if the step ``drafts``."""

    def draft(self, batch: Batch, window: Window) -> DraftTrees:
        """Run the drafter; returns the widest trees that the step may verify, ``[batch, widest]``."""

    def width(self, batch: Batch, trees: DraftTrees) -> int:
        """How many nodes of each tree to verify: 1 up to as many as there are."""

    def masks(self, window: Window, width: int) -> TreeMasks:
        """Where the masks of trees of ``width`` are to be written, for ``verify`` to read; no positions among them."""

    def verify(self, batch: Batch, window: Window, ids: torch.Tensor, masks: TreeMasks) -> Verified:
        """Run the target on ``ids [batch, width]`` at ``masks.positions``; their KV rows go to the window's slots."""

    def law(self, batch: Batch) -> LawTensors | None:
        """How each request samples; None if none does."""

    def seeds(self, batch: Batch) -> torch.Tensor:
        """The seed of each request, int64 ``[batch]``; asked only where one samples."""

    def pools(self) -> PoolTable:
        """The buffers of the target's KV rows; asked once."""

    def append(self, rows: Gathered) -> None:
        """Project packed features and write them into the drafter's KV."""

    def result(self, batch: Batch, outcome: Outcome) -> Result:
        """Hand on what the step gave."""
