"""Walk arithmetic, prompt lookup and budgets on cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from treeverify.bench import walk
from treeverify.tree.build import Candidates, build_tree, top_candidates

HAND = [3, 1, 9, 2, 1, 1]  # steps from place 0: 3 -> place 3: 2 -> place 5: 1 -> end


def test_a_walk_goes_on_by_what_was_accepted():
    assert walk.steps(HAND) == [3, 2, 1]
    assert walk.steps([1, 1, 4]) == [1, 1, 4]  # the last step reaches past the end and counts in full
    assert walk.steps([8]) == [8]


def test_walks_are_pooled_over_texts_as_tokens_over_steps():
    lengths = np.array([HAND, [6, 1, 1, 1, 1, 1]])
    assert walk.walk(lengths) == (3 + 2 + 1 + 6) / 4
    assert walk.walk(lengths[:1]) == 2.0  # the mean over all starts would be 17 / 6
    assert walk.standard_error(lengths[[0, 0]]) == 0.0
    assert walk.standard_error(lengths) == walk.standard_error(lengths) > 0.0


def test_repeated_counts_grams_seen_before_in_their_own_row():
    assert walk.repeated([[1, 2, 1, 2, 1]], n=2) == 2 / 4
    assert walk.repeated([[1, 2], [1, 2]], n=2) == 0.0
    assert walk.repeated([[1]], n=2) == 0.0


@pytest.mark.parametrize(
    ("ids", "most", "found"),
    [
        ([5, 6, 7, 8, 5, 6], 2, [7, 8]),
        ([1, 2, 3, 9, 2, 4, 9, 1, 2], 1, [3]),  # the pair (1, 2) wins over a later lone 2
        ([2, 3, 9, 2, 4, 9, 2], 1, [4]),  # of two the later
        ([2, 3, 4, 5, 9, 2, 7, 2], 4, [3, 4, 5, 9]),  # the latest with enough behind it
        ([4, 4], 7, [4]),
        ([1, 2, 3], 7, []),
        ([1], 7, []),
    ],
)
def test_lookup_copies_what_followed_the_longest_earlier_match(ids, most, found):
    assert walk.lookup(ids, most) == found


def test_lookup_looks_for_no_more_than_its_longest_match():
    assert walk.lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, longest=3) == [9]
    assert walk.lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, longest=2) == [8]


def test_lookup_is_judged_as_a_chain_with_the_root_counted():
    ids, right = [5, 6, 7, 8, 5], np.array([6, 7, 1, 0])
    assert walk.lookup_lengths(ids, 3, [right, np.array([1, 7, 8, 0])]) == [3, 1]
    assert walk.lookup_lengths([1, 2, 3], 3, [right]) == [1]


def test_draft_lengths_of_a_hand_made_draft():
    """Two depths, ranks (10, 11, 12) and (20, 21): order of nodes 10, 10-20, 11, 11-20, 10-21, 12, ..."""
    log_probs = np.log(np.array([[0.5, 0.3, 0.1], [0.8, 0.15, 0.05]], dtype=np.float32))
    candidates = Candidates(log_probs, np.array([[10, 11, 12], [20, 21, 22]]))
    tree = build_tree(1, candidates, 9)
    assert tree.tokens.tolist()[:5] == [1, 10, 20, 11, 20]
    labels = [np.array(row) for row in ([10, 20, 0], [11, 20, 0], [12, 21, 0], [13, 20, 0])]
    assert walk.draft_lengths(1, candidates, labels) == [
        [3, 3, 3, 3, 3, 3],
        [1, 3, 3, 3, 3, 3],  # node 4 ends the path
        [1, 1, 2, 3, 3, 3],
        [1, 1, 1, 1, 1, 1],
    ]


def test_a_cut_path_is_what_the_smaller_tree_accepts():
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.normal(size=(7, 12)).astype(np.float32) * 2
        labels = np.append(np.array([rng.choice(12, p=_law(row)) for row in logits]), 0)
        whole = build_tree(3, top_candidates(logits, 64), 64)
        one_by_one = [
            walk.tree_lengths(build_tree(3, top_candidates(logits, budget), budget), labels, [budget])[0]
            for budget in walk.BUDGETS
        ]
        assert walk.tree_lengths(whole, labels) == one_by_one
        assert one_by_one == sorted(one_by_one)


def _law(logits):
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum()
