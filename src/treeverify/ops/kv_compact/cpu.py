"""``kv_compact`` on a CPU: a move plan of ``kvpool``, made and checked before the first row moves, then carried out."""

from __future__ import annotations

import torch

from treeverify.kvpool.plan import plan_batch_moves
from treeverify.ops.kv_compact.contract import DUMMY_SLOT, PoolTable, check_values


def kv_compact_cpu(table: PoolTable, slots: torch.Tensor, path: torch.Tensor, lengths: torch.Tensor) -> None:
    """Move the rows of a checked call. Raises ``ContractError`` for slots or paths that are none."""
    check_values(table, slots, path, lengths)
    own, paths = slots.numpy(), path.numpy()
    moving = [
        request
        for request, length in enumerate(lengths.tolist())
        if paths[request, length - 1] != length - 1 and (own[request] != DUMMY_SLOT).all()
    ]
    if not moving:
        return
    counts = lengths.tolist()
    plan = plan_batch_moves([paths[request, : counts[request]] for request in moving], [own[r] for r in moving])
    sources, destinations = torch.tensor(plan.sources), torch.tensor(plan.destinations)
    for buffer in table.buffers:
        rows = buffer.detach().flatten(1).view(torch.uint8)  # as bytes: no bit pattern is interpreted
        rows[destinations] = rows[sources]
