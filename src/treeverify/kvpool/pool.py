"""Who owns each slot of the paged KV pool. Page size 1; pure bookkeeping, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import CapacityError, ContractError, PoolCorruption
from treeverify.tree._arrays import require_array, require_int

Owner: TypeAlias = int | str

DUMMY_SLOT = 0
"""Slot 0 is never handed out: padded rows of a captured graph write there."""

_NOBODY = 0  # the internal number of no owner


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """A consistent pool's books: ``capacity`` = ``available`` + the sum over ``held``, slots per owner."""

    capacity: int
    available: int
    held: dict[Owner, int]


class SlotPool:
    """The slots 1 .. capacity of a KV pool; buffers need ``rows`` = capacity + 1 rows, row 0 being the dummy slot.

    The free list is first in, first out, as SGLang's: slots are taken from its head and returned to its tail, so a
    request's slots scatter once the pool has been churned. Every call either does all of its work or none of it.

    Raises ContractError for a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        """Make a pool of ``capacity`` free slots, in rising order."""
        self.capacity = require_int("SlotPool", "capacity", capacity, minimum=1)
        # The free slots, oldest first, are the `_count` entries of the ring from `_head` on.
        self._ring = np.arange(1, self.capacity + 1, dtype=np.int64)
        self._head = 0
        self._count = self.capacity
        self._owner = np.full(self.rows, _NOBODY, dtype=np.int64)
        self._numbers: dict[Owner, int] = {}  # owner -> its number in `_owner`, while it holds a slot
        self._held: dict[Owner, int] = {}
        self._next_number = _NOBODY + 1

    @property
    def rows(self) -> int:
        """Rows a buffer must have to be indexed by this pool's slots."""
        return self.capacity + 1

    @property
    def available(self) -> int:
        """Number of free slots."""
        return self._count

    def alloc(self, n: int, owner: Owner) -> NDArray[np.int64] | None:
        """Take ``n`` >= 0 slots for ``owner``: int64 [n], in free-list order, or None if fewer are free now.

        None changes nothing; the caller waits or preempts. Raises CapacityError if ``n`` exceeds the whole pool, so
        that nobody waits for ever, and ContractError for a negative ``n`` or an owner that is neither int nor str.
        """
        n = require_int("SlotPool.alloc", "n", n)
        _check_owner("SlotPool.alloc", owner)
        if n > self.capacity:
            raise CapacityError(f"SlotPool.alloc: {n} slots for {owner!r}, but the pool has {self.capacity} in all")
        if n > self._count:
            return None
        slots: NDArray[np.int64] = self._ring[self._places(self._head, n)]
        if n == 0:
            return slots
        if owner not in self._numbers:
            self._numbers[owner] = self._next_number
            self._held[owner] = 0
            self._next_number += 1
        self._owner[slots] = self._numbers[owner]
        self._held[owner] += n
        self._head = (self._head + n) % self.capacity
        self._count -= n
        return slots

    def free(self, slots: NDArray[np.int64], owner: Owner) -> None:
        """Return ``slots`` int64 [n], all held by ``owner``, to the tail of the free list in the order given.

        Raises PoolCorruption, having changed nothing, for a slot that does not exist, is named twice, is free already,
        or is another's; ContractError for another dtype or rank.
        """
        slots = require_array("SlotPool.free", "slots", slots, (np.int64,), ndim=1)
        _check_owner("SlotPool.free", owner)
        for slot in slots[(slots < 1) | (slots > self.capacity)]:
            raise PoolCorruption(f"slot {slot}: freed by {owner!r}, but the pool's slots are 1..{self.capacity}")
        number = self._numbers.get(owner, -1)
        for slot in slots[self._owner[slots] != number]:
            holder = self.owner_of(int(slot))
            state = "it is free already (double free)" if holder is None else f"it belongs to {holder!r}"
            raise PoolCorruption(f"slot {slot}: freed by {owner!r}, but {state}")
        unique, repeats = np.unique(slots, return_counts=True)
        for slot in unique[repeats > 1]:
            raise PoolCorruption(f"slot {slot}: named twice in one free by {owner!r} (double free)")
        if len(slots) == 0:
            return
        self._ring[self._places(self._head + self._count, len(slots))] = slots
        self._count += len(slots)
        self._owner[slots] = _NOBODY
        self._held[owner] -= len(slots)
        if self._held[owner] == 0:
            del self._held[owner], self._numbers[owner]

    def owner_of(self, slot: int) -> Owner | None:
        """The owner of ``slot``, None if it is free. Raises PoolCorruption for a slot outside 1..capacity."""
        slot = require_int("SlotPool.owner_of", "slot", slot, minimum=-(2**63))
        if not 1 <= slot <= self.capacity:
            raise PoolCorruption(f"slot {slot}: the pool's slots are 1..{self.capacity}")
        number = self._owner[slot]
        return next((owner for owner, own in self._numbers.items() if own == number), None)

    def held(self, owner: Owner) -> int:
        """Number of slots that ``owner`` holds."""
        return self._held.get(owner, 0)

    def slots_of(self, owner: Owner) -> NDArray[np.int64]:
        """The slots that ``owner`` holds, int64 [held], rising. Scans the pool: for abort and audit, not each step."""
        number = self._numbers.get(owner)
        return np.flatnonzero(self._owner == number) if number is not None else np.empty(0, dtype=np.int64)

    def audit(self) -> PoolAudit:
        """Check that every slot is either free, once, or owned, by one owner; return the books.

        Raises PoolCorruption that names the first slot or owner for which the records disagree.
        """
        free = self._ring[self._places(self._head, self._count)]
        times_free = np.bincount(free, minlength=self.rows)
        owned = self._owner != _NOBODY
        if times_free[DUMMY_SLOT] or owned[DUMMY_SLOT]:
            raise PoolCorruption(f"slot {DUMMY_SLOT}: the dummy slot is in the books")
        for slot in np.flatnonzero(times_free > 1):
            raise PoolCorruption(f"slot {slot}: {times_free[slot]} times in the free list")
        for slot in np.flatnonzero((times_free > 0) & owned):
            raise PoolCorruption(f"slot {slot}: free, and owned by {self.owner_of(int(slot))!r}")
        for slot in np.flatnonzero((times_free == 0) & ~owned)[1:]:  # [0] is the dummy slot
            raise PoolCorruption(f"slot {slot}: lost, neither free nor owned")
        known = np.isin(self._owner, [_NOBODY, *self._numbers.values()])
        for slot in np.flatnonzero(~known):
            raise PoolCorruption(f"slot {slot}: owned by number {self._owner[slot]}, which nobody has")
        for owner, number in self._numbers.items():
            count = int((self._owner == number).sum())
            if count != self._held.get(owner):
                raise PoolCorruption(f"owner {owner!r}: holds {count} slots, but {self._held.get(owner)} are recorded")
        return PoolAudit(self.capacity, self._count, dict(self._held))

    def _places(self, first: int, n: int) -> NDArray[np.int64]:
        """Indices int64 [n] of ``n`` places of the ring from ``first`` on."""
        return np.arange(first, first + n, dtype=np.int64) % self.capacity


def _check_owner(operator: str, owner: object) -> None:
    if isinstance(owner, bool) or not isinstance(owner, int | str):
        raise ContractError.of(operator, "owner", "an int or a str", repr(owner))
