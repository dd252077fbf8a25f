"""``kv_compact``: check the contract, then the pure core on a CPU or the kernel on a GPU."""

from __future__ import annotations

import torch

from treeverify.ops.kv_compact.contract import PoolTable, check
from treeverify.ops.kv_compact.cpu import kv_compact_cpu
from treeverify.ops.kv_compact.cuda import kv_compact_cuda


def kv_compact(table: PoolTable, slots: torch.Tensor, path: torch.Tensor, lengths: torch.Tensor) -> None:
    """Move the accepted KV rows of all layers to the front of each request's slots, in place, bit for bit.

    Args:
        table: the buffers, from ``PoolTable.of``, made once.
        slots: ``[batch, width]`` int32 or int64: the step's reserved slots in node order (SGLang's ``out_cache_loc``).
        path: ``[batch, depth+1]`` int32, lengths: ``[batch]`` int32, as ``tree_accept`` gives them.
        lengths: see ``path``.

    A request whose path is 0, 1, 2, ... moves nothing. Nothing but the destination rows is written.

    Raises:
        ContractError: before the first row moves, naming operator, tensor, expected and got; values (slots in the pool
            and distinct, a rising path) are examined on a CPU only.
    """
    if check(table, slots, path, lengths).on_gpu:
        kv_compact_cuda(table, slots, path, lengths)
    else:
        kv_compact_cpu(table, slots, path, lengths)
