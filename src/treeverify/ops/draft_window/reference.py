"""The definition of ``draft_window``: one request at a time."""

from __future__ import annotations

import torch

from treeverify.ops.draft_window.contract import DraftWindow, check


def draft_window_reference(
    request_rows: torch.Tensor,
    lengths: torch.Tensor,
    slot_table: torch.Tensor,
    roots: torch.Tensor,
    *,
    block: int,
    width: int,
    mask_token: int,
) -> DraftWindow:
    """Find slots and write blocks; arguments and result as in ``api.draft_window``, whatever the device.

    Raises:
        ContractError: the call breaks the contract, or a request's row or window is not inside the table.
    """
    checker = check(request_rows, lengths, slot_table, roots, block, width, mask_token, None)
    rows, columns = slot_table.shape
    out = DraftWindow.empty(len(request_rows), block, width, request_rows.device)
    for request, (row, length) in enumerate(zip(request_rows.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= row < rows:
            raise checker.refuse(f"request_rows[{request}]", f"0..{rows - 1}", row)
        if not 0 <= length <= columns - width:
            raise checker.refuse(f"lengths[{request}]", f"0..{columns - width} (columns - width)", length)
        out.slots[request] = slot_table[row, length : length + width]
        out.block_slots[request] = slot_table[row, length : length + block]
        out.ids[request] = mask_token
        out.ids[request, 0] = max(0, int(roots[request]))
        out.positions[request] = length + torch.arange(block, device=lengths.device)
    return out
