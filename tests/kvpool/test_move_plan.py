"""Move plans: what they contain, and that no order of execution they allow reads an overwritten row (F19)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeverify.errors import ContractError
from treeverify.kvpool.plan import MovePlan, plan_batch_moves, plan_moves


@st.composite
def commits(draw, max_requests=4, max_width=40):
    """Paths and disjoint, scattered slots of a batch."""
    widths = draw(st.lists(st.integers(1, max_width), min_size=1, max_size=max_requests))
    pool = draw(st.permutations(range(1, sum(widths) + 10)))
    paths, slots = [], []
    for width in widths:
        rest = draw(st.sets(st.integers(1, width - 1)) if width > 1 else st.just(set()))
        paths.append(np.array([0, *sorted(rest)], np.int32))
        slots.append(np.array(pool[:width], np.int64))
        pool = pool[width:]
    return paths, slots


def row_by_row(plan, rows):
    out = rows.copy()
    for source, destination in zip(plan.sources, plan.destinations, strict=True):
        out[destination] = out[source]
    return out


def gather_then_scatter(plan, rows):
    out = rows.copy()
    out[plan.destinations] = rows[plan.sources]
    return out


def definition(paths, slots, rows):
    out = rows.copy()
    for path, own in zip(paths, slots, strict=True):
        out[own[: len(path)]] = rows[own[path]]
    return out


@settings(max_examples=200)
@given(commits())
def test_both_allowed_executions_equal_the_definition(commit):
    paths, slots = commit
    plan = plan_batch_moves(paths, slots)
    rows = np.arange(1000) * 7
    expected = definition(paths, slots, rows)
    assert (row_by_row(plan, rows) == expected).all()
    assert (gather_then_scatter(plan, rows) == expected).all()
    assert len(plan.sources) == sum(int((path != np.arange(len(path))).sum()) for path in paths)


def test_the_identity_path_needs_no_moves():
    plan = plan_moves(np.arange(5, dtype=np.int32), np.array([9, 4, 7, 2, 3]))
    assert len(plan.sources) == 0


def test_a_path_is_moved_to_the_front_of_its_slots_in_rising_order():
    plan = plan_moves(np.array([0, 3, 4], np.int32), np.array([50, 10, 40, 20, 30], np.int32))
    assert list(zip(plan.sources.tolist(), plan.destinations.tolist(), strict=True)) == [(20, 10), (30, 40)]
    assert (plan.sources.dtype, plan.destinations.dtype) == (np.int64, np.int64)


def test_a_shift_of_a_whole_chain_overlaps_and_must_not_run_backwards():
    width = 20
    path = np.array([0, *range(2, width)], np.int32)
    slots = np.arange(1, width + 1)
    plan = plan_moves(path, slots)
    rows = np.arange(100)
    backwards = rows.copy()
    for source, destination in reversed(list(zip(plan.sources, plan.destinations, strict=True))):
        backwards[destination] = backwards[source]
    expected = definition([path], [slots], rows)
    assert (row_by_row(plan, rows) == expected).all()
    assert (backwards != expected).any()


def test_a_plan_is_frozen():
    plan = plan_moves(np.array([0, 2]), np.array([5, 6, 7]))
    with pytest.raises(ValueError, match="read-only"):
        plan.sources[0] = 1


SLOTS = np.array([5, 6, 7, 8])


@pytest.mark.parametrize(
    ("path", "slots", "message"),
    [
        (np.array([1, 2]), SLOTS, "begins with the root 0"),
        (np.array([], np.int32), SLOTS, "begins with the root 0"),
        (np.array([0, 2, 2]), SLOTS, "strictly rising"),
        (np.array([0, 3, 1]), SLOTS, "strictly rising"),
        (np.array([0, 4]), SLOTS, "nodes below 4"),
        (np.array([0]), np.array([], np.int64), "nodes below 0"),
        (np.array([0, -1]), SLOTS, "strictly rising"),
        (np.array([0, 1]), np.array([5, 6, 5]), r"distinct slots, got 5 again \(request 0\)"),
        (np.array([0, 1]), np.array([5, 0]), "slots >= 1, got 0"),
        (np.array([0, 1]), np.array([5, -3]), "slots >= 1, got -3"),
        (np.array([0.0, 1.0]), SLOTS, "path.*dtype: expected int32 or int64, got float64"),
        (np.array([0, 1]), SLOTS.astype(np.uint64), "slots.*dtype: expected int32 or int64, got uint64"),
        (np.array([[0, 1]]), SLOTS, "path.*rank: expected 1"),
        ([0, 1], SLOTS, "path.*expected a numpy array"),
    ],
)
def test_bad_paths_and_slots_are_refused(path, slots, message):
    with pytest.raises(ContractError, match=message):
        plan_moves(path, slots)


def test_requests_that_share_a_slot_are_refused_by_request():
    path = np.array([0, 1])
    with pytest.raises(ContractError, match=r"slots\[2\]: expected distinct slots, got 2 again \(request 0\)"):
        plan_batch_moves([path] * 3, [np.array([1, 2]), np.array([3, 4]), np.array([5, 2])])
    with pytest.raises(ContractError, match="slots: requests: expected 1"):
        plan_batch_moves([path], [])
    assert len(plan_batch_moves([], []).sources) == 0


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([1, 2], [2, 3], r"sources\[1\]: expected a row not yet overwritten, got 2, as move 0"),
        ([1, 2], [3, 3], r"destinations\[1\]: expected a new row, got 3, as move 0"),
        ([1, 4], [2, 4], "move 1: expected no identity, got 4 -> 4"),
        ([0], [1], "move 0: expected slots >= 1"),
        ([1], [0], "move 0: expected slots >= 1"),
        ([1, 2], [3], "destinations: moves: expected 2"),
    ],
)
def test_a_hazardous_plan_cannot_be_made_by_hand(sources, destinations, message):
    with pytest.raises(ContractError, match=message):
        MovePlan(np.array(sources, np.int64), np.array(destinations, np.int64))


def test_strided_paths_and_slots_are_read_as_their_copies():
    plan = plan_moves(np.array([0, 9, 2, 9, 3])[::2], np.arange(1, 9)[::-2])
    assert plan.sources.tolist() == [4, 2]
    assert plan.destinations.tolist() == [6, 4]
