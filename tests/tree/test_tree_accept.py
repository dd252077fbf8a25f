"""Acceptance against a naive walk. Covers F4 (an accepted path fits depth + 1) of the field faults."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_topology import make, trees

from treeverify.errors import ContractError
from treeverify.tree.accept import accept
from treeverify.tree.build import Candidates, build_tree, chain_tree


def naive_walk(tree, samples):
    path = [0]
    while True:
        children = [n for n in range(tree.width) if tree.parents[n] == path[-1]]
        matching = [n for n in children if tree.tokens[n] == samples[path[-1]]]
        if not matching:
            return path, samples[path[-1]]
        path.append(min(matching))


@settings(max_examples=300)
@given(trees(max_width=40, max_token=2), st.data())
def test_the_path_is_the_naive_walk(tree, data):
    samples = data.draw(st.lists(st.integers(0, 3), min_size=tree.width, max_size=tree.width))
    got = accept(tree, np.array(samples, np.int64))
    path, bonus = naive_walk(tree, samples)
    assert got.path.tolist() == path
    assert got.path.dtype == np.int32
    assert got.bonus == bonus
    assert got.length == len(path) <= tree.max_depth + 1
    assert got.new_tokens(tree).tolist() == [*(tree.tokens[n] for n in path[1:]), bonus]
    assert got.new_tokens(tree).dtype == np.int64


def test_of_equal_siblings_the_lowest_numbered_is_followed():
    tree = make([0, 5, 5, 6, 7], [-1, 0, 0, 1, 2])
    assert accept(tree, np.array([5, 6, 7, 1, 1])).path.tolist() == [0, 1, 3]
    # 7 hangs below the second 5 only: it cannot be reached, so it is a bonus and not an accepted node.
    got = accept(tree, np.array([5, 7, 7, 1, 1]))
    assert (got.path.tolist(), got.bonus) == ([0, 1], 7)


def test_repeated_candidates_waste_nodes_but_follow_the_likelier_branch():
    found = Candidates(np.array([[-0.1, -2.0], [-0.1, -2.0]], np.float32), np.array([[5, 5], [6, 6]], np.int64))
    tree = build_tree(0, found, 6)
    got = accept(tree, np.where(tree.depths == 0, 5, 6).astype(np.int64))
    assert got.path.tolist() == [0, 1, 2]
    assert got.bonus == 6


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_accepted_paths_of_a_deep_batch_fit_buffers_of_depth_plus_one(branch):
    # 32 nodes, depth 7, 3 requests; buffers of [3, depth + 1] exactly, between guards.
    parents = [-1, 0, 1, 2, 3, 4, 5, 6] + [0] * 24
    tree = make([0, 1, 2, 3, 4, 5, 6, 7, *range(100, 124)], parents)
    assert (tree.width, tree.max_depth) == (32, 7)
    samples = np.full((3, 32), 99, np.int64)
    samples[branch, :7] = np.arange(1, 8)
    guarded = np.full((5, 8), -7, np.int32)
    for request in range(3):
        path = accept(tree, samples[request]).path
        guarded[1 + request, : len(path)] = path  # raises if the path is longer than the row
    assert guarded[1 + branch].tolist() == list(range(8))
    assert (guarded[[0, 4]] == -7).all()


def test_a_chain_and_the_root_alone_are_walked_by_the_same_code():
    chain = chain_tree(9, [1, 2, 3])
    assert accept(chain, np.array([1, 2, 8, 4])).path.tolist() == [0, 1, 2]
    assert accept(chain, np.array([1, 2, 3, 4])).bonus == 4
    alone = accept(chain_tree(9, []), np.array([5]))
    assert (alone.path.tolist(), alone.bonus) == ([0], 5)


def test_strided_samples_are_read_as_their_copy():
    tree = chain_tree(9, [1, 2, 3])
    assert accept(tree, np.array([1, 0, 2, 0, 3, 0, 4, 0])[::2]).path.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(4, np.int32), "samples: dtype: expected int64, got int32"),
        (np.zeros(3, np.int64), "samples: width: expected 4"),
        (np.zeros(5, np.int64), "samples: width: expected 4"),
        (np.zeros((4, 1), np.int64), "samples: rank: expected 1"),
        (np.array([0, 0, -1, 0]), r"samples\[2\]: expected >= 0, got -1"),
        ([0, 0, 0, 0], "samples: expected a numpy array"),
    ],
)
def test_bad_samples_are_refused_by_name(samples, message):
    with pytest.raises(ContractError, match=message):
        accept(chain_tree(9, [1, 2, 3]), samples)
