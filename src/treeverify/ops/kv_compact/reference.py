"""The definition of ``kv_compact``: for every layer one gather of all accepted rows, then one scatter."""

from __future__ import annotations

import torch

from treeverify.ops.kv_compact.contract import PoolTable, check, check_values


def kv_compact_reference(table: PoolTable, slots: torch.Tensor, path: torch.Tensor, lengths: torch.Tensor) -> None:
    """Move the rows; arguments as in ``api.kv_compact``, whatever the device. Everything is checked before a row moves.

    Raises:
        ContractError: the call breaks the contract; a path does not rise from 0 or leaves the width; a slot is not in
            the pool, or is named twice (other than slot 0).
    """
    check(table, slots, path, lengths)
    check_values(table, slots, path, lengths)
    sources: list[int] = []
    destinations: list[int] = []
    for request, length in enumerate(lengths.tolist()):
        own, nodes = slots[request].tolist(), path[request, :length].tolist()
        moves = [(own[node], own[place]) for place, node in enumerate(nodes) if own[node] != own[place]]
        sources += [source for source, _ in moves]
        destinations += [destination for _, destination in moves]
    source, destination = (
        torch.tensor(rows, dtype=torch.int64, device=slots.device) for rows in (sources, destinations)
    )
    for buffer in table.buffers:
        row = buffer.shape[1:].numel() * buffer.element_size()
        rows = buffer.view(torch.uint8).as_strided(  # as bytes: no bit pattern is interpreted
            (table.rows, row), (table.stride_bytes, 1), buffer.storage_offset() * buffer.element_size()
        )
        rows[destination] = rows[source]
