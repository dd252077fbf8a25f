"""The contract of ``draft_window``: the slots of a step and the drafter's input, in one launch.

Request i has ``lengths[i]`` committed tokens and owns row ``request_rows[i]`` of the slot table. Its window is the
``width`` slots behind them, columns ``lengths[i]`` to ``lengths[i] + width - 1``. The drafter's block is the root and
``block - 1`` mask tokens in the first ``block`` of those slots, at positions from ``lengths[i]`` on. A negative root is
no token (logits that were NaN) and becomes 0. A row or column outside the table, which a CPU refuses, is slot 0 on a
GPU: the dummy slot, which nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeverify.ops.checks import INDEX_DTYPES, Checker

OPERATOR = "draft_window"
MAX_WIDTH = 257
MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, eq=False)
class DraftWindow:
    """The outputs of a batch."""

    slots: torch.Tensor
    """``[batch, width]`` int64."""
    block_slots: torch.Tensor
    """``[batch, block]`` int64: the first columns of ``slots``, contiguous."""
    ids: torch.Tensor
    """``[batch, block]`` int64: root, then mask tokens."""
    positions: torch.Tensor
    """``[batch, block]`` int64."""

    @classmethod
    def empty(cls, batch: int, block: int, width: int, device: torch.device | str) -> DraftWindow:
        """Unwritten outputs."""
        columns = (width, block, block, block)
        return cls(*(torch.empty(batch, count, dtype=torch.int64, device=device) for count in columns))


def check(
    request_rows: torch.Tensor,
    lengths: torch.Tensor,
    slot_table: torch.Tensor,
    roots: torch.Tensor,
    block: int,
    width: int,
    mask_token: int,
    out: DraftWindow | None,
) -> Checker:
    """Check one call (see ``api.draft_window``); raises ``ContractError``. Reads no value of a tensor."""
    checker = Checker.of(OPERATOR, "request_rows", request_rows)
    checker.tensor("request_rows", request_rows, INDEX_DTYPES, (None,))
    batch = request_rows.shape[0]
    checker.tensor("lengths", lengths, INDEX_DTYPES, (batch,))
    checker.tensor("slot_table", slot_table, (torch.int32,), (None, None))
    checker.tensor("roots", roots, INDEX_DTYPES, (batch,))
    checker.integer("width", width, 1, MAX_WIDTH)
    checker.integer("block", block, 1, width)
    checker.integer("mask_token", mask_token, 0, MAX_TOKEN)
    if out is not None:
        for name, columns in (("slots", width), ("block_slots", block), ("ids", block), ("positions", block)):
            checker.tensor(f"out.{name}", getattr(out, name), (torch.int64,), (batch, columns))
    return checker
