"""The contract of ``kv_compact``: the commit of a step in every layer's KV pool, in place.

Row ``slots[i, path[i, j]]`` moves to row ``slots[i, j]`` for each j below ``lengths[i]``, as ``kvpool.plan`` plans.
The slots of a request are distinct and no two requests share one, except the dummy slot 0, which padded requests of a
captured graph may name as often as they like (a row never moves onto itself).

*Free of hazards*: a path rises strictly from 0, so ``path[j] >= j``. Row ``slots[path[j]]`` is read by move j and
written, if at all, by move path[j] >= j. One thread moves a given range of bytes of all rows of a request, in rising
order of j, reading before it writes; so no row is read after it was overwritten, and no other thread touches its bytes.

A path that is not a rising one from 0 within the width, as a padded request may hold, moves nothing at and after the
first node that breaks the rule (a call on a CPU refuses it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treeverify.errors import ContractError
from treeverify.ops.checks import INDEX_DTYPES, Checker

OPERATOR = "kv_compact"
DUMMY_SLOT = 0
MAX_WIDTH = 257


@dataclass(frozen=True, eq=False)
class PoolTable:
    """The KV buffers of all layers: made once, outside of any capture; keeps them alive. Build it with `of`."""

    buffers: tuple[torch.Tensor, ...]
    """``[slots, ..., dim]`` each, of one shape, dtype and row stride; each row is contiguous."""
    pointers: torch.Tensor
    """``[layers]`` int64 on the buffers' device: their addresses."""
    row_bytes: int
    stride_bytes: int
    """From row to row."""

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> PoolTable:
        """Describe the buffers (K and V buffers of a layer are two of them). Copies their addresses to the device.

        Raises ContractError that names the buffer: no tensor, no buffer at all, another shape, dtype, stride or device
        than the first one's, rows that are not contiguous or overlap, or memory given twice.
        """
        if isinstance(buffers, torch.Tensor) or not buffers:
            raise ContractError.of(OPERATOR, "buffers", "a sequence of at least one tensor", type(buffers).__name__)
        checker = Checker.of(OPERATOR, "buffers[0]", buffers[0])
        for number, buffer in enumerate(buffers):
            _check_buffer(checker, f"buffers[{number}]", buffer, buffers[0])
        addresses = [buffer.data_ptr() for buffer in buffers]
        for number, address in enumerate(addresses):
            if address in addresses[:number] and buffers[0].numel():
                other = addresses.index(address)
                raise checker.refuse(f"buffers[{number}]", "memory of its own", f"the memory of buffers[{other}]")
        size = buffers[0].element_size()
        return cls(
            tuple(buffers),
            torch.tensor(addresses, dtype=torch.int64, device=checker.device),
            buffers[0][:1].numel() * size,
            buffers[0].stride(0) * size,
        )

    @property
    def rows(self) -> int:
        """Rows (slots) of each buffer."""
        return self.buffers[0].shape[0]

    @property
    def unit(self) -> int:
        """Bytes that are moved at a time: 16, 8, 4, 2 or 1, as addresses, row sizes and strides allow."""
        together = self.row_bytes | self.stride_bytes
        for buffer in self.buffers:
            together |= buffer.data_ptr()
        return min(16, together & -together) if together else 16


def check(table: PoolTable, slots: torch.Tensor, path: torch.Tensor, lengths: torch.Tensor) -> Checker:
    """Check one call (see ``api.kv_compact``); raises ``ContractError``. Reads no value of a tensor."""
    if not isinstance(table, PoolTable):
        raise ContractError.of(OPERATOR, "table", "a PoolTable", type(table).__name__)
    checker = Checker(OPERATOR, table.pointers.device)
    checker.tensor("slots", slots, INDEX_DTYPES, (None, None))
    batch, width = slots.shape
    checker.integer("slots: dimension 1 (width)", width, 1, MAX_WIDTH)
    checker.tensor("path", path, (torch.int32,), (batch, None))
    checker.integer("path: dimension 1 (depth + 1)", path.shape[1], 1, MAX_WIDTH)
    checker.tensor("lengths", lengths, (torch.int32,), (batch,))
    return checker


def check_values(table: PoolTable, slots: torch.Tensor, path: torch.Tensor, lengths: torch.Tensor) -> None:
    """Check the values of a call on a CPU; raises ``ContractError`` for a slot or a path that is none."""
    seen: set[int] = set()
    for request, (own, nodes, length) in enumerate(zip(slots.tolist(), path.tolist(), lengths.tolist(), strict=True)):
        for node, slot in enumerate(own):
            if not 0 <= slot < table.rows:
                raise ContractError.of(OPERATOR, f"slots[{request}, {node}]", f"0..{table.rows - 1}", slot)
            if slot in seen and slot != DUMMY_SLOT:
                raise ContractError.of(OPERATOR, f"slots[{request}, {node}]", "distinct slots", f"{slot} again")
            seen.add(slot)
        nodes = nodes[: max(length, 0)]
        if len(nodes) != length or length < 1 or nodes[0] != 0 or nodes != sorted(set(nodes)) or nodes[-1] >= len(own):
            expected = f"{length} nodes rising from 0, below {len(own)}"
            raise ContractError.of(OPERATOR, f"path[{request}]", expected, nodes)


def _check_buffer(checker: Checker, name: str, buffer: torch.Tensor, first: torch.Tensor) -> None:
    if not isinstance(buffer, torch.Tensor):
        raise checker.refuse(name, "a torch.Tensor", type(buffer).__name__)
    if buffer.ndim < 2:
        raise checker.refuse(f"{name}: rank", "at least 2 [slots, ..., dim]", list(buffer.shape))
    mine = (buffer.shape, buffer.dtype, buffer.stride(), buffer.device)
    whole = (first.shape, first.dtype, first.stride(), first.device)
    if mine != whole:
        raise checker.refuse(name, f"shape, dtype, strides and device of buffers[0]: {whole}", mine)
    row = buffer[:1].numel()
    if not buffer[:1].is_contiguous() or (buffer.shape[0] > 1 and buffer.stride(0) < row):
        raise checker.refuse(f"{name}: strides", f"contiguous rows of {row} elements", list(buffer.stride()))
