"""Trees: the constructor's rules, and what is derived from them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeverify.errors import ContractError
from treeverify.tree.topology import Tree


@st.composite
def trees(draw, max_width=80, max_token=6):
    """Any legal tree, duplicate siblings included."""
    width = draw(st.integers(1, max_width))
    parents = [-1] + [draw(st.integers(max(0, i - 8), i - 1)) for i in range(1, width)]
    tokens = draw(st.lists(st.integers(0, max_token), min_size=width, max_size=width))
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int32))


def make(tokens, parents):
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int32))


@settings(max_examples=50)
@given(trees())
def test_depth_counts_the_steps_to_the_root(tree):
    for node in range(tree.width):
        steps, at = 0, node
        while tree.parents[at] != -1:
            at, steps = tree.parents[at], steps + 1
        assert tree.depths[node] == steps
    assert tree.max_depth == max(tree.depths)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0], r"parents\[0\]: expected -1"),
        ([-1, -1], r"parents\[1\]: expected 0..0 .*, got -1"),
        ([-1, 1], r"parents\[1\]: expected 0..0 .*, got 1"),
        ([-1, 0, 3, 0], r"parents\[2\]: expected 0..1 .*, got 3"),
        ([-1, 0, 2], r"parents\[2\]: expected 0..1 .*, got 2"),
    ],
)
def test_parents_out_of_order_are_refused_by_node(parents, message):
    with pytest.raises(ContractError, match=message):
        make(range(len(parents)), parents)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        (np.zeros(0, np.int64), np.zeros(0, np.int32), "tokens: width: expected >= 1"),
        (np.zeros(2, np.int32), np.array([-1, 0], np.int32), "tokens: dtype: expected int64, got int32"),
        (np.zeros(2, np.int64), np.array([-1, 0], np.int64), "parents: dtype: expected int32, got int64"),
        (np.zeros((2, 1), np.int64), np.array([-1, 0], np.int32), "tokens: rank: expected 1, got 2"),
        (np.zeros(3, np.int64), np.array([-1, 0], np.int32), "parents: width: expected 3"),
        (np.array([0, -5], np.int64), np.array([-1, 0], np.int32), r"tokens\[1\]: expected >= 0, got -5"),
        ([0, 1], np.array([-1, 0], np.int32), "tokens: expected a numpy array, got list"),
        (np.zeros(2, ">i8"), np.array([-1, 0], np.int32), "tokens: dtype: expected int64"),
    ],
)
def test_wrong_arrays_are_refused_by_name(tokens, parents, message):
    with pytest.raises(ContractError, match=message):
        Tree(tokens, parents)


def test_a_tree_is_a_frozen_copy_of_inputs_with_any_strides():
    tokens = np.arange(6, dtype=np.int64)
    parents = np.array([-1, 7, 0, 7, 1, 7], np.int32)
    tree = Tree(tokens[::2], parents[::2])
    tokens[:] = 99
    assert tree.tokens.tolist() == [0, 2, 4]
    assert tree.parents.tolist() == [-1, 0, 1]
    for array in (tree.tokens, tree.parents, tree.depths):
        assert array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
