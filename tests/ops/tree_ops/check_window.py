"""draft_window against slices of the slot table, bit for bit."""

from __future__ import annotations

import numpy as np
import torch
from tree_cases import WIDTHS, Buffers, equal

from treeverify.ops.draft_window.contract import DraftWindow

MASK = 2**31 - 1


def agrees(ops, random: np.random.Generator, batch: int, block: int, width: int, index=torch.int64) -> None:
    """Random rows, lengths that reach the table's last column and its first, roots that are no token."""
    rows, columns = batch + 3, width + 40
    table = random.integers(1, 2**31, (rows, columns)).astype(np.int32)
    own = random.permutation(rows)[:batch]
    lengths = random.integers(0, columns - width + 1, batch)
    lengths[0], lengths[-1] = 0, columns - width
    roots = random.integers(-3, 2**31, batch)
    roots[0] = -1
    buffers = Buffers(ops.device)
    out = buffers.like(DraftWindow.empty(batch, block, width, "cpu"))
    given = [torch.from_numpy(np.asarray(values)).to(index).to(ops.device) for values in (own, lengths, roots)]
    slots = torch.from_numpy(table).to(ops.device)
    ops.draft_window(given[0], given[1], slots, given[2], block=block, width=width, mask_token=MASK, out=out)
    buffers.intact()
    want = np.stack([table[row, length : length + width] for row, length in zip(own, lengths, strict=True)])
    ids = np.full((batch, block), MASK)
    ids[:, 0] = np.maximum(roots, 0)
    equal("slots", out.slots, want)
    equal("block_slots", out.block_slots, want[:, :block])
    equal("ids", out.ids, ids)
    equal("positions", out.positions, lengths[:, None] + np.arange(block))


def windows_round_the_block_of_threads(ops) -> None:
    random = np.random.default_rng(0)
    for width in WIDTHS:
        for block in sorted({1, min(8, width), width}):
            agrees(ops, random, 4, block, width)


def index_dtypes_and_batches(ops) -> None:
    random = np.random.default_rng(1)
    for batch in (1, 5, 40):
        for index in (torch.int32, torch.int64):
            agrees(ops, random, batch, 8, 33, index)


def no_requests(ops) -> None:
    out = DraftWindow.empty(0, 2, 3, ops.device)
    none = torch.zeros(0, dtype=torch.int64, device=ops.device)
    table = torch.ones(2, 9, dtype=torch.int32, device=ops.device)
    ops.draft_window(none, none, table, none, block=2, width=3, mask_token=0, out=out)


def places_outside_the_table_are_slot_zero(ops) -> None:
    """On a GPU; the reference refuses them (tree_bad_calls)."""
    if ops.name == "cpu":
        return
    far = 2**62
    whole = torch.full((5, 6), 77, dtype=torch.int32, device=ops.device)
    whole[1:4] = torch.arange(100, 118, device=ops.device).view(3, 6)
    table = whole[1:4]  # what lies round the table must not be read
    own = torch.tensor([-1, 3, far, -far, 0, 1, 2, 2, 1], device=ops.device)
    lengths = torch.tensor([0, 0, 0, 0, far, -1, 3, 6, 5], device=ops.device)
    roots = torch.full((9,), -far, device=ops.device)
    buffers = Buffers(ops.device)
    out = buffers.like(DraftWindow.empty(9, 2, 4, "cpu"))
    ops.draft_window(own, lengths, table, roots, block=2, width=4, mask_token=5, out=out)
    buffers.intact()
    want = [[0] * 4] * 6 + [[115, 116, 117, 0], [0] * 4, [111, 0, 0, 0]]
    equal("slots", out.slots, want)
    equal("block_slots", out.block_slots, [row[:2] for row in want])
    equal("ids", out.ids, [[0, 5]] * 9)


CHECKS = {
    check.__name__: check
    for check in (
        windows_round_the_block_of_threads,
        index_dtypes_and_batches,
        no_requests,
        places_outside_the_table_are_slot_zero,
    )
}
