"""Carrying out a move plan in the tensors of every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from treeverify.errors import ContractError
from treeverify.kvpool.plan import MovePlan

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run_moves(plan: MovePlan, buffers: Sequence[torch.Tensor]) -> None:
    """Move the plan's rows, in place and bit for bit, in every buffer.

    ``buffers``: [slots, dim] (one layer) or [layers, slots, dim], any dtype of 1 to 8 bytes, device and strides; all
    are checked before the first row moves. Each buffer gets one gather of all sources, then one scatter, so no row
    is read after it was overwritten. Two buffers must not share memory: the shared rows would move twice.

    Raises ContractError for another rank or dtype, too few slots for the plan, a buffer given twice, or no buffer list.
    """
    if isinstance(buffers, torch.Tensor):
        raise ContractError.of("run_moves", "buffers", "a sequence of tensors", "one tensor; pass [tensor]")
    _check_buffers(plan, buffers)
    if plan.moves == 0:
        return
    indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
    for buffer in buffers:
        if buffer.device not in indices:
            indices[buffer.device] = (
                torch.tensor(plan.sources, device=buffer.device),
                torch.tensor(plan.destinations, device=buffer.device),
            )
        sources, destinations = indices[buffer.device]
        # As integers of the same size: no dtype lacks the two operations, and no bit pattern is interpreted.
        bits = buffer.detach().view(_BITS[buffer.element_size()])
        bits.index_copy_(-2, destinations, bits.index_select(-2, sources))


def _check_buffers(plan: MovePlan, buffers: Sequence[torch.Tensor]) -> None:
    seen: dict[tuple[torch.device, int], int] = {}
    for i, buffer in enumerate(buffers):
        name = f"buffers[{i}]"
        if not isinstance(buffer, torch.Tensor):
            raise ContractError.of("run_moves", name, "a tensor", type(buffer).__name__)
        if buffer.ndim not in (2, 3):
            raise ContractError.of(
                "run_moves", f"{name}: rank", "2 [slots, dim] or 3 [layers, slots, dim]", list(buffer.shape)
            )
        if buffer.element_size() not in _BITS:
            raise ContractError.of("run_moves", f"{name}: dtype", "1, 2, 4 or 8 bytes", buffer.dtype)
        if buffer.shape[-2] <= plan.largest_slot:
            raise ContractError.of("run_moves", f"{name}: slots", f"> {plan.largest_slot}", buffer.shape[-2])
        if buffer.numel() == 0:
            continue
        other = seen.setdefault((buffer.device, buffer.data_ptr()), i)
        if other != i:
            raise ContractError.of("run_moves", name, "memory of its own", f"the memory of buffers[{other}]")
