"""The engine's memory: slot ownership, the target's KV pool, and the drafter's context rows under the same slots."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from treeverify.engine.protocols import Drafter, Target
from treeverify.engine.request import Request
from treeverify.errors import ConfigError, PoolCorruption
from treeverify.kvpool.pool import PoolAudit, SlotPool

Ints = NDArray[np.int64]
ROW = 576
_SHUFFLER = "shuffle"


class Cache:
    """A paged pool of ``capacity`` slots (page size 1), handed out in an order scattered by ``seed``."""

    def __init__(self, target: Target, drafter: Drafter | None, capacity: int, seed: int) -> None:
        """Allocate all buffers; they are filled with NaN, so that a row read before it was written shows."""
        self.pool = SlotPool(capacity)
        scattered = self.pool.alloc(capacity, _SHUFFLER)
        assert scattered is not None
        self.pool.free(np.random.default_rng(seed).permutation(scattered), _SHUFFLER)
        self.kv = target.new_pool(self.pool.rows)
        if self.kv.shape[2] != ROW:
            raise ConfigError(f"target: KV row: expected {ROW} values (512 latent + 64 rope), got {self.kv.shape[2]}")
        self.layers = list(self.kv)
        self.context = None if drafter is None else drafter.new_pool(self.pool.rows)
        for buffer in (self.kv, self.context):
            if buffer is not None:
                buffer.fill_(float("nan"))
                buffer.narrow(1 if buffer is self.kv else 0, 0, 1).zero_()  # the dummy row stays finite

    def grow(self, request: Request, least: int, most: int) -> bool:
        """Let ``request`` own ``most`` slots, or as many as are free, but at least ``least``.

        False, and nothing changed, if the pool has too few free.
        """
        missing = min(most, max(least, request.owned + self.pool.available)) - request.owned
        if missing <= 0:
            return True
        slots = self.pool.alloc(missing, request.id)
        if slots is None:
            return False
        request.slots[request.owned : request.owned + missing] = slots
        request.owned += missing
        return True

    def release(self, request: Request, keep: int = 0) -> None:
        """Take back every slot that ``request`` owns beyond the first ``keep``."""
        self.pool.free(request.slots[keep : request.owned], request.id)
        request.owned = keep

    def audit(self, requests: list[Request]) -> PoolAudit:
        """Check the books, and that each slot belongs to the request that lists it; PoolCorruption otherwise."""
        books = self.pool.audit()
        listed = {request.id: request.owned for request in requests if request.owned}
        if books.held != listed:
            raise PoolCorruption(f"slots held: the pool says {books.held}, the requests say {listed}")
        for request in requests:
            mine = np.sort(request.slots[: request.owned])
            if not np.array_equal(mine, self.pool.slots_of(request.id)):
                raise PoolCorruption(f"request {request.id}: lists slots that are not its own")
        return books


def to_device(array: Ints, device: torch.device) -> torch.Tensor:
    """The array as a tensor on ``device``; on a CPU it shares memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
