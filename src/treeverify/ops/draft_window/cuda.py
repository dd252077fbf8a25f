"""The compiled ``draft_window``: passes the buffers to the library; no arithmetic, no allocation, no wait."""

from __future__ import annotations

import torch

from treeverify.ops import compiled
from treeverify.ops.draft_window.contract import DraftWindow


def draft_window_cuda(
    request_rows: torch.Tensor,
    lengths: torch.Tensor,
    slot_table: torch.Tensor,
    roots: torch.Tensor,
    mask_token: int,
    out: DraftWindow,
) -> None:
    """Launch on torch's current stream; arguments as in ``api.draft_window``. Raises ``ValueError``, ``BuildError``."""
    run = compiled.function("draft_window", request_rows.device)
    run(request_rows, lengths, slot_table, roots, mask_token, out.slots, out.block_slots, out.ids, out.positions)
