"""``draft_window``: check the contract, then the reference on a CPU or the kernel on a GPU."""

from __future__ import annotations

import torch

from treeverify.ops.draft_window.contract import DraftWindow, check
from treeverify.ops.draft_window.cuda import draft_window_cuda
from treeverify.ops.draft_window.reference import draft_window_reference


def draft_window(
    request_rows: torch.Tensor,
    lengths: torch.Tensor,
    slot_table: torch.Tensor,
    roots: torch.Tensor,
    *,
    block: int,
    width: int,
    mask_token: int,
    out: DraftWindow | None = None,
) -> DraftWindow:
    """Find the slots of a step and write the drafter's block; ``contract`` says what of each request goes where.

    Args:
        request_rows: ``[batch]`` int32 or int64: rows of the slot table (SGLang's ``req_pool_indices``).
        lengths: ``[batch]`` int32 or int64: committed tokens, the root not among them (SGLang's ``seq_lens``).
        slot_table: ``[rows, columns]`` int32: the slot of each token of each row (SGLang's ``req_to_token``).
        roots: ``[batch]`` int32 or int64: the token that the step before added; negative: none, becomes 0.
        block: columns of the drafter's block, the root among them; 1..width.
        width: slots of each request, 1..257.
        mask_token: what the drafter reads where it is to predict, 0..2^31-1.
        out: outputs of exactly these sizes; with it a call on a GPU allocates nothing.

    Returns:
        ``out``, or new outputs.

    Raises:
        ContractError: before anything is written, naming operator, tensor, expected and got; values (rows, lengths)
            are examined on a CPU only. The kernel reads nothing outside the table.
    """
    checker = check(request_rows, lengths, slot_table, roots, block, width, mask_token, out)
    if not checker.on_gpu:
        sizes = {"block": block, "width": width, "mask_token": mask_token}
        made = draft_window_reference(request_rows, lengths, slot_table, roots, **sizes)
        if out is None:
            return made
        for name in ("slots", "block_slots", "ids", "positions"):
            getattr(out, name).copy_(getattr(made, name))
        return out
    if out is None:
        out = DraftWindow.empty(len(request_rows), block, width, request_rows.device)
    draft_window_cuda(request_rows, lengths, slot_table, roots, mask_token, out)
    return out
