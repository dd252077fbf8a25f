"""The target's law against brute-force definitions, and draws from it. Covers F29 (chi-square) of the field faults."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from treeverify.errors import ConfigError, ContractError
from treeverify.tree.accept import accept
from treeverify.tree.build import build_tree, top_candidates
from treeverify.tree.law import LawParams, sample, target_law

LOGITS = [-math.inf, -2.0, -1.0, 0.0, 0.0, 0.5, 1.0, 3.0]
PARAMS = st.builds(
    LawParams,
    temperature=st.sampled_from([0.0, 9e-6, 0.3, 1.0, 1.7, 50.0]),
    top_k=st.sampled_from([None, 1, 2, 3, 7, 100]),
    top_p=st.sampled_from([1.0, 0.97, 0.8, 0.5, 0.123, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.11, 0.4, 1.0]),
)


@st.composite
def finite_rows(draw, max_vocab=12):
    row = draw(st.lists(st.sampled_from(LOGITS), min_size=1, max_size=max_vocab))
    assume(max(row) > -math.inf)
    return row


def brute_force(logits, params):
    """The documented filters one token at a time, and the distance of the nearest top-p decision from its bound."""
    vocab = len(logits)
    order = sorted(range(vocab), key=lambda token: (-logits[token], token))
    if params.temperature < 1e-5:
        return [float(token == order[0]) for token in range(vocab)], 1.0
    weights = [math.exp((logit - max(logits)) / params.temperature) for logit in logits]
    kept = order if params.top_k is None else order[: params.top_k]
    mass, total, nucleus, margin = 0.0, math.fsum(weights[token] for token in kept), [], 1.0
    for token in kept:
        if params.top_p < 1:
            margin = min(margin, abs(mass / total - params.top_p))
            if mass / total >= params.top_p:
                break
        nucleus.append(token)
        mass += weights[token]
    kept = [token for token in nucleus if weights[token] >= params.min_p]
    total = math.fsum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(vocab)], margin


@settings(max_examples=500)
@given(finite_rows(), PARAMS)
def test_the_law_is_its_definition(row, params):
    expected, margin = brute_force(row, params)
    assume(margin > 1e-12)  # nearer than that, rounding may decide
    got = target_law(np.array(row), params)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got > 0, np.array(expected) > 0)
    np.testing.assert_allclose(got, expected, rtol=1e-13)


@settings(max_examples=100)
@given(PARAMS, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_rows_together_equal_each_alone(params, rows, seed):
    logits = np.random.default_rng(seed).normal(size=(rows, 40)).astype(np.float32)
    together = target_law(logits, params)
    for row, logit_row in enumerate(logits):
        assert together[row].tolist() == target_law(logit_row, params).tolist()


@pytest.mark.parametrize("params", [LawParams(1.0, top_k=2), LawParams(1.0, top_p=0.5), LawParams(1.0, top_p=0.26)])
def test_ties_at_a_boundary_go_to_the_smaller_ids(params):
    assert target_law(np.zeros(4), params).tolist() == [0.5, 0.5, 0, 0]


def test_a_tie_at_the_argmax_goes_to_the_smaller_id():
    logits = np.array([1, 7, 7, 0], np.float32)
    assert target_law(logits, LawParams(0.0)).tolist() == [0, 1, 0, 0]


def test_top_p_is_judged_after_top_k_is_renormalised():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the first two, 4/7 and 3/7: 4/7 alone reaches 0.55. Before renormalising, 0.4 would not.
    assert target_law(logits, LawParams(1.0, top_k=2, top_p=0.55)).tolist() == [1, 0, 0, 0]


def test_min_p_is_relative_to_the_largest_and_comes_after_top_p():
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    # Were min-p first, it would leave 2/3 and 1/3, of which the first alone reaches 0.6.
    np.testing.assert_allclose(target_law(logits, LawParams(1.0, top_p=0.6, min_p=0.4)), [2 / 3, 1 / 3, 0, 0])


def test_the_greedy_bound_is_the_papers():
    logits = np.array([0.0, 1e-6])
    assert target_law(logits, LawParams(9.9e-6)).tolist() == [0, 1]
    assert target_law(logits, LawParams(1e-5))[0] == pytest.approx(1 / (1 + math.exp(0.1)))
    assert LawParams(9.9e-6).greedy
    assert not LawParams(1e-5).greedy


def test_extreme_logits_and_temperatures_stay_a_law():
    logits = np.array([[1e308, -1e308, -np.inf, 1e308], [0.0, -1e-300, -np.inf, -1e308]])
    for temperature in (1e-5, 1.0, 1e300):
        got = target_law(logits, LawParams(temperature))
        np.testing.assert_allclose(got.sum(axis=-1), 1)
        assert (got[:, 2] == 0).all()
    # Logits that no temperature can tell apart any more are still ranked as logits.
    assert target_law(np.array([0.0, 1.0]), LawParams(1e300, top_k=1)).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_leading_dimensions_strides_and_float_widths_are_kept(dtype):
    logits = np.random.default_rng(3).normal(size=(8, 3, 11)).astype(dtype)
    view = logits[::2, ::-1].swapaxes(0, 2)
    params = LawParams(0.9, top_k=2, top_p=0.9)
    assert target_law(view, params).tobytes() == target_law(view.copy().astype(np.float64), params).tobytes()
    before = view.copy()
    target_law(view, params)
    assert (view == before).all()


def test_the_memory_order_of_the_logits_does_not_change_a_bit():
    logits = np.random.default_rng(4).normal(size=(50, 300))
    for params in (LawParams(1.0), LawParams(1.0, top_p=0.7)):
        assert target_law(np.asfortranarray(logits), params).tobytes() == target_law(logits, params).tobytes()


def test_top_p_of_1_drops_nothing_that_top_k_keeps_however_unlikely():
    law = target_law(np.array([0.0, -40.0, -50.0]), LawParams(1.0, top_k=2))
    assert law[1] == pytest.approx(math.exp(-40), rel=1e-12, abs=0)
    assert law[2] == 0


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1e-9, -1, math.nan, math.inf, -math.inf, "1", None, True]),
        ("top_k", [0, -1, 1.5, math.nan, "3", True]),
        ("top_p", [0, 0.0, -0.1, 1.0000001, math.nan, math.inf, None, True]),
        ("min_p", [-1e-9, 1.0000001, math.nan, None, False]),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name}: expected"):
            LawParams(**{name: value})


def test_numpy_numbers_and_the_edges_of_each_range_are_fine():
    LawParams(np.float32(0), np.int64(1), np.float64(1), 0)
    LawParams(1, 2**62, 5e-324, 1)


@pytest.mark.parametrize("call", [lambda x: target_law(x, LawParams(0.0)), lambda x: target_law(x, LawParams(1.0))])
def test_nan_and_infinite_logits_are_refused_with_their_row_and_token(call):
    for bad in (math.nan, math.inf):
        logits = np.zeros((2, 3, 5))
        logits[1, 2, 4] = bad
        with pytest.raises(ContractError, match=rf"got {bad} at row \(1, 2\), token 4"):
            call(logits)
    logits = np.full((2, 3, 5), -math.inf)
    logits[0] = logits[1, 1:] = 0
    with pytest.raises(ContractError, match=r"only -inf at row \(1, 0\)"):
        call(logits)
    for shape in ((), (2, 0)):
        with pytest.raises(ContractError, match=r"logits: shape: expected \[..., vocab >= 1\]"):
            call(np.zeros(shape))
    with pytest.raises(ContractError, match="dtype: expected float16 or float32 or float64, got int64"):
        call(np.zeros(3, np.int64))


EDGES = [0.0, 5e-324, 1e-17, 0.5, 1 - 2**-53, 1 - 2**-24]


@settings(max_examples=300)
@given(finite_rows(), PARAMS, st.one_of(st.sampled_from(EDGES), st.floats(0, 1, exclude_max=True)))
def test_a_drawn_token_has_positive_probability_and_inverts_the_cumulative_law(row, params, uniform):
    law = target_law(np.array(row), params)
    token = int(sample(law, np.array(uniform)))
    assert law[token] > 0
    below = math.fsum(law[:token])
    assert below - 1e-15 <= uniform <= below + law[token] + 1e-15


@pytest.mark.parametrize("uniform", EDGES)
def test_zero_probabilities_at_both_ends_are_never_drawn(uniform):
    tenth = np.array([0, 0, *[0.1] * 10, 0, 0])  # ten times 0.1 falls short of 1
    for law in (tenth, tenth * (1 + 9e-7), tenth * (1 - 9e-7), np.array([0, 1e-320, 1.0, 1e-320, 0])):
        assert law[sample(law, np.array(uniform))] > 0


@pytest.mark.parametrize("last", [True, False])
def test_a_law_of_one_token_ignores_the_uniform(last):
    law = np.zeros((len(EDGES), 4))
    law[:, 3 * last] = 1
    assert (sample(law, np.array(EDGES)) == 3 * last).all()


def test_draws_follow_the_law_and_a_greedy_fallback_would_show():
    rng = np.random.default_rng(20240607)
    logits = rng.normal(size=12)
    for params in (LawParams(1.0), LawParams(0.7, top_k=8), LawParams(1.4, top_p=0.9), LawParams(1.0, min_p=0.05)):
        law = target_law(logits, params)
        draws = sample(np.broadcast_to(law, (20_000, 12)), rng.random(20_000))
        counts = np.bincount(draws, minlength=12)
        assert counts[law == 0].sum() == 0
        assert stats.chisquare(counts[law > 0], 20_000 * law[law > 0]).pvalue > 1e-3
        greedy = np.bincount(np.full(20_000, law.argmax()), minlength=12)
        assert stats.chisquare(greedy[law > 0], 20_000 * law[law > 0]).pvalue < 1e-6


def test_a_tree_at_temperature_above_0_yields_the_targets_law_whatever_was_drafted():
    # The first two new tokens of a step, jointly, when the second comes from the node reached or, on a miss, from the
    # next step's root; the target's law depends on the token before.
    rng = np.random.default_rng(99)
    vocab, draws = 5, 20_000
    target = target_law(rng.normal(size=(vocab, vocab)), LawParams(0.8, top_p=0.95))
    tree = build_tree(0, top_candidates(rng.normal(size=(2, vocab)).astype(np.float32), 4), 4)
    laws = target[tree.tokens]
    counts = np.zeros((vocab, vocab))
    for uniforms in rng.random((draws, tree.width + 1)):
        got = accept(tree, sample(laws, uniforms[:-1]))
        tokens = got.new_tokens(tree).tolist()
        if len(tokens) == 1:
            tokens.append(int(sample(target[got.bonus], uniforms[-1:].reshape(()))))
        counts[tokens[0], tokens[1]] += 1
    joint = target[0][:, None] * target
    assert counts[joint == 0].sum() == 0
    assert stats.chisquare(counts[joint > 0], draws * joint[joint > 0]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("law", "uniforms", "message"),
    [
        (np.ones((2, 1)), np.array([0.5, 1.0]), r"uniforms: expected in \[0, 1\), got 1.0 at row \(1,\)"),
        (np.ones((2, 1)), np.array([-0.1, 0.5]), r"uniforms: .*got -0.1 at row \(0,\)"),
        (np.ones((1, 1)), np.array([math.nan]), r"uniforms: .*got nan"),
        (np.ones((2, 1)), np.array([0.5]), r"uniforms: shape: expected \[2\]"),
        (np.ones((2, 1), np.float32), np.array([0.5, 0.5]), "law: dtype: expected float64"),
        (np.ones((2, 1)), np.zeros(2, np.float32), "uniforms: dtype: expected float64"),
        (np.array([[0.5, 0.5], [0.5, 0.4]]), np.zeros(2), r"law: .*got sum 0.9 at row \(1,\)"),
        (np.array([[1.5, -0.5]]), np.zeros(1), "law: expected rows >= 0 that sum to 1"),
        (np.array([[math.nan, 1.0]]), np.zeros(1), "law: .*got sum nan"),
        (np.zeros((2, 0)), np.zeros(2), "law: vocab: expected >= 1"),
    ],
)
def test_what_is_no_law_or_no_uniform_is_refused(law, uniforms, message):
    with pytest.raises(ContractError, match=message):
        sample(law, uniforms)
