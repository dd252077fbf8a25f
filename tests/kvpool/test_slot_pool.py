"""The slot pool as a state machine against a plain model, and every kind of corruption."""

from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treeverify.errors import CapacityError, ContractError, PoolCorruption
from treeverify.kvpool.pool import SlotPool

CAPACITY = 13
OWNERS = st.sampled_from([0, 1, "a", "b"])


class PoolMachine(RuleBasedStateMachine):
    """Random alloc, partial free, abort, out of memory and hostile frees, beside a deque and a dict."""

    def __init__(self):
        super().__init__()
        self.pool = SlotPool(CAPACITY)
        self.free_list = deque(range(1, CAPACITY + 1))
        self.owned = {}

    def slots_of(self, owner):
        return [slot for slot, held_by in self.owned.items() if held_by == owner]

    @rule(n=st.integers(0, CAPACITY), owner=OWNERS)
    def alloc(self, n, owner):
        slots = self.pool.alloc(n, owner)
        if n > len(self.free_list):
            assert slots is None
            return
        expected = [self.free_list.popleft() for _ in range(n)]
        assert slots.tolist() == expected
        assert slots.dtype == np.int64
        self.owned.update(dict.fromkeys(expected, owner))

    @rule(n=st.integers(CAPACITY + 1, 10**12), owner=OWNERS)
    def alloc_more_than_there_is(self, n, owner):
        with pytest.raises(CapacityError):
            self.pool.alloc(n, owner)

    @rule(data=st.data(), owner=OWNERS)
    def free_some(self, data, owner):
        slots = self.slots_of(owner)
        chosen = data.draw(st.permutations(slots))[: data.draw(st.integers(0, len(slots)))]
        self.pool.free(np.array(chosen, np.int64), owner)
        self.forget(chosen)

    @rule(owner=OWNERS)
    def abort(self, owner):
        slots = self.pool.slots_of(owner)
        assert slots.tolist() == sorted(self.slots_of(owner))
        self.pool.free(slots, owner)
        self.forget(slots.tolist())

    def forget(self, slots):
        self.free_list.extend(slots)
        for slot in slots:
            del self.owned[slot]

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def hostile_free_changes_nothing(self, data):
        slot, owner = data.draw(st.sampled_from(sorted(self.owned.items())))
        other = data.draw(OWNERS.filter(lambda name: name != owner))
        bad = [slot, slot], [slot, 0], [slot, CAPACITY + 1], [slot, -1], *([slot, free] for free in self.free_list)
        for slots in bad:
            with pytest.raises(PoolCorruption):
                self.pool.free(np.array(slots, np.int64), owner)
        with pytest.raises(PoolCorruption, match=f"slot {slot}: freed by {other!r}, but it belongs to {owner!r}"):
            self.pool.free(np.array([slot], np.int64), other)

    @invariant()
    def no_slot_is_lost_or_owned_twice(self):
        books = self.pool.audit()
        held = {}
        for slot in range(1, CAPACITY + 1):
            owner = self.owned.get(slot)
            assert self.pool.owner_of(slot) == owner
            assert type(self.pool.owner_of(slot)) is type(owner)
            if owner is not None:
                held[owner] = held.get(owner, 0) + 1
        assert books.held == held
        assert books.available == self.pool.available == len(self.free_list)
        assert books.capacity == books.available + sum(held.values()) == CAPACITY
        assert all(self.pool.held(owner) == held.get(owner, 0) for owner in (0, 1, "a", "b"))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_slots_scatter_under_churn_because_the_free_list_is_first_in_first_out():
    pool = SlotPool(6)
    a, b = pool.alloc(2, "a"), pool.alloc(2, "b")
    assert (a.tolist(), b.tolist()) == ([1, 2], [3, 4])
    pool.free(a[::-1], "a")
    assert pool.alloc(4, "c").tolist() == [5, 6, 2, 1]
    assert pool.rows == 7


def test_the_returned_slots_are_the_callers_own():
    pool = SlotPool(4)
    pool.alloc(2, 1)[:] = 99
    assert pool.audit().held == {1: 2}
    assert pool.slots_of(1).tolist() == [1, 2]


def test_a_double_free_is_named():
    pool = SlotPool(4)
    slots = pool.alloc(2, 1)
    pool.free(slots, 1)
    with pytest.raises(PoolCorruption, match=r"slot 1: freed by 1, but it is free already \(double free\)"):
        pool.free(slots, 1)
    assert pool.available == 4


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda pool: pool.alloc(-1, 1), "n: expected >= 0"),
        (lambda pool: pool.alloc(1.0, 1), "n: expected an integer"),
        (lambda pool: pool.alloc(1, None), "owner: expected an int or a str, got None"),
        (lambda pool: pool.alloc(1, True), "owner: expected an int or a str, got True"),
        (lambda pool: pool.free(np.array([1], np.int32), 1), "slots: dtype: expected int64"),
        (lambda pool: pool.free(np.array([[1]]), 1), "slots: rank: expected 1"),
        (lambda pool: pool.free([1], 1), "slots: expected a numpy array"),
        (lambda pool: SlotPool(0), "capacity: expected >= 1"),
    ],
)
def test_bad_arguments_are_refused_by_name(act, message):
    pool = SlotPool(4)
    pool.alloc(2, 1)
    with pytest.raises(ContractError, match=message):
        act(pool)
    assert pool.audit().held == {1: 2}


@pytest.mark.parametrize("slot", [0, -1, 5, 10**20])
def test_a_slot_that_does_not_exist_has_no_owner(slot):
    with pytest.raises((PoolCorruption, ContractError), match=r"slot"):
        SlotPool(4).owner_of(slot)


def spoil(**changes):
    """A pool of 6 in which 1 and 2 are owned by "a" and 3 is owned by "b", with its private records then changed."""
    pool = SlotPool(6)
    pool.alloc(2, "a")
    pool.alloc(1, "b")
    pool.audit()
    for index, value in changes.get("owner", {}).items():
        pool._owner[index] = value
    for index, value in changes.get("ring", {}).items():
        pool._ring[index] = value
    pool._count += changes.get("count", 0)
    pool._held.update(changes.get("held", {}))
    return pool


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (spoil(owner={1: 0}), "slot 1: lost, neither free nor owned"),
        (spoil(owner={4: 1}), "slot 4: free, and owned by 'a'"),
        (spoil(owner={2: 2}), "owner 'a': holds 1 slots, but 2 are recorded"),
        (spoil(owner={2: 77}), "slot 2: owned by number 77, which nobody has"),
        (spoil(owner={0: 1}), "slot 0: the dummy slot is in the books"),
        (spoil(ring={4: 0}), "slot 0: the dummy slot is in the books"),
        (spoil(ring={4: 4}), "slot 4: 2 times in the free list"),
        (spoil(count=-1), "slot 6: lost, neither free nor owned"),
        (spoil(count=1), "slot 1: free, and owned by 'a'"),
        (spoil(held={"b": 3}), "owner 'b': holds 1 slots, but 3 are recorded"),
    ],
)
def test_the_audit_names_what_is_wrong(pool, message):
    with pytest.raises(PoolCorruption, match=message):
        pool.audit()
