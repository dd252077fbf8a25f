"""The compiled ``kv_compact``: passes the buffers to the library; no arithmetic, no allocation, no wait."""

from __future__ import annotations

import torch

from treeverify.ops import compiled
from treeverify.ops.kv_compact.contract import PoolTable


def kv_compact_cuda(table: PoolTable, slots: torch.Tensor, path: torch.Tensor, lengths: torch.Tensor) -> None:
    """Launch on torch's current stream; arguments as in ``api.kv_compact``. Raises ``ValueError``, ``BuildError``."""
    run = compiled.function("kv_compact", slots.device)
    run(table.pointers, slots, path, lengths, table.row_bytes, table.stride_bytes, table.unit)
