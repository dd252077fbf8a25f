"""The best-first builder against brute force, and the ranking of candidates. Covers F30 of the field faults."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeverify.errors import ContractError
from treeverify.tree.build import Candidates, build_tree, chain_tree, top_candidates

# Few distinct values, so that sums tie; thirds, so that float32 sums round; -inf is never drafted.
LOG_PROBS = [0.0, -0.25, -0.5, -1.0, -1 / 3, -2 / 3, -0.1, -1e-8, -20.0, -np.inf]


@st.composite
def candidates(draw, max_depth=4, max_k=5, values=LOG_PROBS):
    depth, k = draw(st.integers(0, max_depth)), draw(st.integers(0, max_k))
    rows = [sorted(draw(st.lists(st.sampled_from(values), min_size=k, max_size=k)), reverse=True) for _ in range(depth)]
    ids = draw(st.lists(st.integers(0, 9), min_size=depth * k, max_size=depth * k))
    return Candidates(np.array(rows, np.float32).reshape(depth, k), np.array(ids, np.int64).reshape(depth, k))


def brute_force(found, budget):
    """Score every rank tuple, sort by (falling float32 score, tuple), cut at the budget."""
    depth, k = found.log_probs.shape
    scored = []
    for length in range(1, depth + 1):
        for ranks in product(range(k), repeat=length):
            score = np.float32(0)
            for level, rank in enumerate(ranks):
                score = np.float32(score + found.log_probs[level, rank])
            if score > -np.inf:
                scored.append((-float(score), ranks))
    return [ranks for _, ranks in sorted(scored)[:budget]]


def ranks_of(tree, found):
    """Rank tuples of the nodes, recovered from parents alone: a parent's children come in order of rank."""
    tuples, children = {0: ()}, dict.fromkeys(range(tree.width), 0)
    for node in range(1, tree.width):
        parent = int(tree.parents[node])
        tuples[node] = (*tuples[parent], children[parent])
        children[parent] += 1
        assert tree.tokens[node] == found.token_ids[len(tuples[node]) - 1, tuples[node][-1]]
    return [tuples[node] for node in range(1, tree.width)]


@settings(max_examples=300)
@given(candidates(), st.integers(0, 40))
def test_the_tree_is_the_brute_force_best_in_order(found, budget):
    assert ranks_of(build_tree(3, found, budget), found) == brute_force(found, budget)


@settings(max_examples=100)
@given(candidates(), st.integers(0, 20), st.integers(0, 20))
def test_a_smaller_budget_is_a_prefix(found, small, more):
    little, large = build_tree(3, found, small), build_tree(3, found, small + more)
    assert little.tokens.tolist() == large.tokens[: little.width].tolist()
    assert little.parents.tolist() == large.parents[: little.width].tolist()


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_k_equal_to_the_budget_loses_nothing(budget, seed):
    logits = np.random.default_rng(seed).integers(-3, 3, (3, 15)).astype(np.float32)
    short = build_tree(0, top_candidates(logits, budget), budget)
    full = build_tree(0, top_candidates(logits, 15), budget)
    assert short.tokens.tolist() == full.tokens.tolist()
    assert short.parents.tolist() == full.parents.tolist()


def test_scores_accumulate_in_float32_not_in_float64():
    # In float64, 0 + -1 + -1e-8 is below -1 and rank (1,) would come before (0, 0); in float32 they tie at -1, and the
    # smaller tuple comes first.
    found = Candidates(np.array([[-1, -1], [-1e-8, -1e-8]], np.float32), np.array([[1, 2], [3, 4]], np.int64))
    assert ranks_of(build_tree(0, found, 3), found) == [(0,), (0, 0), (0, 1)]


def test_equal_scores_come_in_lexicographic_order_of_ranks():
    found = Candidates(np.zeros((2, 2), np.float32), np.array([[1, 2], [3, 4]], np.int64))
    tree = build_tree(0, found, 99)
    assert ranks_of(tree, found) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert tree.tokens.tolist() == [0, 1, 3, 4, 2, 3, 4]


def test_deep_and_wide_ranks_still_compare_as_tuples():
    # 40 levels of 30 ranks: a tuple's number needs more than 64 bits.
    found = Candidates(np.zeros((40, 30), np.float32), np.tile(np.arange(30, dtype=np.int64), (40, 1)))
    ranks = ranks_of(build_tree(0, found, 100), found)
    assert ranks == sorted(ranks)
    assert ranks[39:42] == [(0,) * 40, (0,) * 39 + (1,), (0,) * 39 + (2,)]


def test_a_sum_that_overflows_float32_is_not_drafted_and_any_finite_one_is():
    chain = Candidates(np.full((2, 1), -3e38, np.float32), np.array([[1], [2]], np.int64))
    assert build_tree(0, chain, 9).tokens.tolist() == [0, 1]
    low = Candidates(np.array([[0, -3e38], [-1, -3e38]], np.float32), np.array([[1, 2], [3, 4]], np.int64))
    assert ranks_of(build_tree(0, low, 9), low) == [(0,), (0, 0), (0, 1), (1,), (1, 0)]


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (3, 4)])
def test_budget_0_or_no_candidates_give_the_root_alone(shape):
    found = Candidates(np.zeros(shape, np.float32), np.zeros(shape, np.int64))
    for budget in (0, 5) if 0 in shape else (0,):
        assert build_tree(7, found, budget).tokens.tolist() == [7]


@pytest.mark.parametrize(
    ("root", "budget", "message"),
    [
        (0, -1, "budget: expected >= 0, got -1"),
        (0, 1.0, "budget: expected an integer, got 1.0"),
        (0, True, "budget: expected an integer, got True"),
        (0, None, "budget: expected an integer, got None"),
        (-1, 4, "root_token: expected >= 0, got -1"),
        (2**63, 4, "root_token: expected <= 9223372036854775807"),
    ],
)
def test_bad_budgets_and_roots_are_refused(root, budget, message):
    found = Candidates(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64))
    with pytest.raises(ContractError, match=message):
        build_tree(root, found, budget)


def test_numpy_integers_are_integers():
    found = Candidates(np.zeros((2, 1), np.float32), np.ones((2, 1), np.int64))
    assert build_tree(np.int64(4), found, np.int32(2)).width == 3


@pytest.mark.parametrize("tokens", [[], [5], [5, 6, 6, 7], np.array([5, 6], np.int32), np.arange(8)[::3]])
def test_a_chain_is_its_tokens_in_a_row(tokens):
    tree = chain_tree(9, tokens)
    assert tree.tokens.tolist() == [9, *(int(t) for t in tokens)]
    assert tree.parents.tolist() == list(range(-1, len(tokens)))


@pytest.mark.parametrize(
    ("tokens", "message"), [([1, 2.5], r"tokens\[1\]: expected an integer"), ([-2], r"tokens\[0\]")]
)
def test_a_chain_of_anything_but_token_ids_is_refused(tokens, message):
    with pytest.raises(ContractError, match=message):
        chain_tree(9, tokens)


LOGITS = [-np.inf, -3.0, -1.0, -0.0, 0.0, 1.0, 1.5, 90.0]


@settings(max_examples=300)
@given(st.integers(0, 3), st.integers(1, 12), st.integers(0, 14), st.data())
def test_candidates_are_the_stable_sort_and_the_exact_log_softmax(depth, vocab, k, data):
    flat = data.draw(st.lists(st.sampled_from(LOGITS), min_size=depth * vocab, max_size=depth * vocab))
    logits = np.array(flat, np.float32).reshape(depth, vocab)
    found = top_candidates(logits, k)
    assert found.log_probs.shape == found.token_ids.shape == (depth, min(k, vocab))
    for row in range(depth):
        order = sorted(range(vocab), key=lambda token: (-logits[row, token], token))[:k]
        assert found.token_ids[row].tolist() == order
        wide = logits[row].astype(np.float64)
        if wide.max() > -np.inf:
            exact = wide - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))
            # float32 logits up to 90: half an ulp of 90 (3.8e-6) twice, for the logsumexp and for the difference
            np.testing.assert_allclose(found.log_probs[row], exact[order], atol=8e-6, rtol=0)
        else:
            assert (found.log_probs[row] == -np.inf).all()


def test_a_large_vocabulary_full_of_ties_ranks_by_id():
    logits = np.random.default_rng(5).integers(-2, 2, (4, 5000)).astype(np.float32)
    found = top_candidates(logits, 64)
    for row in range(4):
        assert found.token_ids[row].tolist() == np.argsort(-logits[row], kind="stable")[:64].tolist()


def test_log_probabilities_never_exceed_0_even_when_one_logit_takes_all():
    rng = np.random.default_rng(6)
    logits = (rng.normal(size=(50, 300)) * 200).astype(np.float32)
    assert top_candidates(logits, 5).log_probs.max() == 0.0


def test_minus_infinity_is_never_drafted():
    logits = np.full((3, 6), -np.inf, np.float32)
    logits[0, [1, 4]] = 0
    logits[1, 3] = 2
    logits[2, :] = 1
    tree = build_tree(0, top_candidates(logits, 6), 500)
    assert tree.width == 1 + 2 + 2 * 1 + 2 * 6
    assert set(tree.tokens[tree.depths == 1]) == {1, 4}
    assert set(tree.tokens[tree.depths == 2]) == {3}


def test_a_depth_with_nothing_to_draft_ends_the_tree_above_it():
    logits = np.zeros((3, 4), np.float32)
    logits[1] = -np.inf
    assert build_tree(0, top_candidates(logits, 4), 500).width == 5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("k", [0, 1, 5, 99])
def test_nan_and_plus_infinity_are_refused_with_their_position(bad, k):
    logits = np.full((4, 9), -np.inf, np.float32)
    logits[2, 7] = bad
    with pytest.raises(ContractError, match=f"logits: .*{bad} at depth 2, token id 7"):
        top_candidates(logits, k)


@pytest.mark.parametrize(
    ("logits", "k", "message"),
    [
        (np.zeros((2, 3), np.float64), 1, "dtype: expected float32, got float64"),
        (np.zeros((2, 3), np.int32), 1, "dtype: expected float32, got int32"),
        (np.zeros(3, np.float32), 1, "rank: expected 2"),
        (np.zeros((2, 0), np.float32), 1, "vocab: expected >= 1"),
        (np.zeros((2, 3), np.float32), -1, "k: expected >= 0"),
    ],
)
def test_bad_logits_are_refused_by_name(logits, k, message):
    with pytest.raises(ContractError, match=message):
        top_candidates(logits, k)


def test_strided_logits_rank_as_their_copy():
    wide = np.random.default_rng(7).normal(size=(40, 6)).astype(np.float32)
    view = wide[::2].T
    a, b = top_candidates(view, 5), top_candidates(view.copy(), 5)
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert a.log_probs.tobytes() == b.log_probs.tobytes()


@pytest.mark.parametrize(
    ("log_probs", "ids", "message"),
    [
        ([[0.1]], [[1]], r"log_probs\[0, 0\]: expected <= 0"),
        ([[-1, np.nan]], [[1, 2]], r"log_probs\[0, 1\]: .*got nan"),
        ([[np.nan]], [[1]], r"log_probs\[0, 0\]: .*got nan"),
        ([[-1, -1], [-2, -1]], [[1, 2], [1, 2]], r"log_probs\[1, 1\]: expected <= 0 and not above rank - 1"),
        ([[-1]], [[-4]], r"token_ids\[0, 0\]: expected >= 0, got -4"),
        ([[-1, -2]], [[1]], r"token_ids: shape: expected \[1, 2\]"),
        ([-1], [1], "log_probs: rank: expected 2"),
    ],
)
def test_bad_candidates_are_refused_by_entry(log_probs, ids, message):
    with pytest.raises(ContractError, match=message):
        Candidates(np.array(log_probs, np.float32), np.array(ids, np.int64))


def test_candidates_of_other_dtypes_are_refused_and_the_accepted_are_frozen():
    with pytest.raises(ContractError, match="token_ids: dtype: expected int64, got int32"):
        Candidates(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int32))
    with pytest.raises(ContractError, match="log_probs: dtype: expected float32, got float64"):
        Candidates(np.zeros((1, 1)), np.zeros((1, 1), np.int64))
    log_probs = np.zeros((1, 1), np.float32)
    found = Candidates(log_probs, np.zeros((1, 1), np.int64))
    log_probs[0, 0] = 9
    assert found.log_probs[0, 0] == 0
    assert not found.token_ids.flags.writeable
