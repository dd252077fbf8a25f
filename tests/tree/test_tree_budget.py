"""The width that pays, against brute force; calibration; prefixes of scored trees."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeverify.errors import ContractError
from treeverify.tree.budget import LEAST, MOST, SHORTEST_PAUSE, Calibration, Pauses, choose_width, path_mass
from treeverify.tree.build import Candidates, build_scored, build_tree

HALVES = st.sampled_from([0.0, -np.log(2), -np.log(4), -np.log(8), -20.0, -np.inf])
LADDERS = st.lists(st.integers(2, 40), max_size=6, unique=True).map(lambda rest: [1, *sorted(rest)])


@st.composite
def score_rows(draw):
    rest = sorted(draw(st.lists(HALVES, max_size=45)), reverse=True)
    return np.array([0.0, *rest], dtype=np.float32)


@st.composite
def cases(draw):
    ladder = draw(LADDERS)
    costs = draw(st.lists(st.floats(0.5, 50), min_size=len(ladder), max_size=len(ladder)))
    return draw(st.lists(score_rows(), min_size=1, max_size=4)), ladder, costs, draw(st.floats(0.25, 4))


@given(cases())
def test_the_width_is_the_argmax_of_expected_tokens_per_millisecond(case):
    rows, ladder, costs, factor = case
    chosen = choose_width(rows, ladder, costs, factor)
    rates = {}
    for width, cost in zip(ladder, costs, strict=True):
        if width == 1 or any(len(row) >= width for row in rows):
            mass = sum(np.exp(float(score)) for row in rows for score in row[1:width])
            rates[width] = (len(rows) + factor * mass) / cost
    assert chosen in rates
    assert rates[chosen] >= max(rates.values()) * (1 - 1e-12)


@given(score_rows(), LADDERS, st.floats(0.1, 10), st.floats(0.1, 10))
def test_dearer_widths_never_widen_the_choice(row, ladder, slope, more):
    def chosen(per_node):
        return choose_width([row], ladder, [1 + per_node * width for width in ladder])

    assert chosen(slope + more) <= chosen(slope)


def test_ties_go_to_the_smaller_width_and_free_nodes_are_taken():
    row = np.log(np.array([1, 0.5, 0.5], dtype=np.float32))
    certain = np.zeros(4, dtype=np.float32)
    assert choose_width([certain], [1, 2, 4], [1.0, 2.0, 4.0]) == 1  # exactly one token per millisecond each
    assert choose_width([certain], [1, 2, 4], [3.0, 2.0, 4.0]) == 2
    assert choose_width([row], [1, 2, 3], [2.0, 2.0, 2.0]) == 3
    assert choose_width([row], [1, 2, 3, 9], [2.0, 2.0, 2.0, 1e-6]) == 3  # there are no nine nodes
    assert choose_width([row[:1]], [1, 2], [9.0, 1e-6]) == 1


def test_a_factor_widens_and_narrows():
    row = np.array([0.0, np.log(0.5)], dtype=np.float32)
    costs = [1.0, 1.5001]
    assert choose_width([row], [1, 2], costs, 1.0) == 1
    assert choose_width([row], [1, 2], costs, 1.1) == 2


def test_the_mass_is_the_sum_of_path_probabilities():
    rows = np.log(np.array([[0.5, 0.25], [0.75, 0.125]], dtype=np.float32))
    found = build_scored(3, Candidates(rows, np.array([[7, 8], [9, 10]])), 4)
    exact = [Fraction(1, 2), Fraction(3, 8), Fraction(1, 4), Fraction(3, 16)]
    sums = [float(sum(exact[:n], Fraction(0))) for n in range(5)]
    np.testing.assert_allclose(path_mass(found.scores, [1, 2, 3, 4, 5, 99]), [*sums, sums[-1]], rtol=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 21))
def test_the_front_of_a_tree_is_the_tree_of_the_smaller_budget(seed, width):
    rng = np.random.default_rng(seed)
    rows = -np.sort(rng.exponential(size=(3, 5)), axis=1).astype(np.float32)
    found = Candidates(rows, rng.integers(0, 99, (3, 5)))
    whole = build_scored(1, found, 20)
    assert (np.diff(whole.scores) <= 0).all()
    assert len(whole.scores) == whole.tree.width
    small = build_tree(1, found, width - 1)
    np.testing.assert_array_equal(whole.tree.tokens[:width], small.tokens)
    np.testing.assert_array_equal(whole.tree.parents[:width], small.parents)


def test_the_calibration_learns_a_factor_and_is_bounded():
    drafter = Calibration()
    assert drafter.factor == 1.0
    for _ in range(300):
        drafter.observe(1.5, 3.0)
    assert drafter.factor == pytest.approx(0.5, abs=0.01)
    for accepted, expected, bound in ((0.0, 7.0, LEAST), (7.0, 0.0, MOST)):
        for _ in range(500):
            drafter.observe(accepted, expected)
        assert drafter.factor == bound


ROW = np.zeros(2, dtype=np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [1], [1.0]), "scores: expected at least one request"),
        (([ROW], [2, 3], [1.0, 1.0]), "ladder: expected widths that begin with 1"),
        (([ROW], [1, 3, 3], [1.0, 1.0, 1.0]), "ladder: expected rising widths"),
        (([ROW], [1, 2], [1.0]), "step_ms: expected 2 positive numbers"),
        (([ROW], [1, 2], [1.0, float("nan")]), "step_ms"),
        (([ROW], [1, 2], [0.0, 1.0]), "step_ms"),
        (([ROW], [1], [1.0], 0.0), "factor: expected > 0"),
        (([ROW.astype(np.float64)], [1], [1.0]), "scores: dtype"),
        (([ROW * np.float32("nan")], [1], [1.0]), "scores: expected 0 for the root"),
        (([ROW[:0]], [1], [1.0]), "scores: expected 0 for the root"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ContractError, match=message):
        choose_width(*arguments)


def test_bad_observations_are_refused():
    with pytest.raises(ContractError, match="accepted, expected"):
        Calibration().observe(float("nan"), 1.0)


def pause(pauses):
    """Steps of the pause that unlucky steps begin, of which the first has been asked for; asks for the try after it."""
    before, waited = pauses.begun, 0
    while True:
        pauses.observe(0.2, 1.0)
        if pauses.begun > before:
            break
        assert pauses.drafts()
    while not pauses.drafts():
        waited += 1
    return waited


def test_a_try_is_judged_by_itself_and_one_that_pays_makes_pauses_short_again():
    pauses = Pauses()
    assert pauses.drafts()
    assert [pause(pauses) for _ in range(5)] == [16, 32, 64, 128, 128]
    pauses.observe(1.01, 1.0)
    assert pauses.gain > 1
    assert pauses.drafts()
    assert pause(pauses) == SHORTEST_PAUSE
    assert pauses.begun == 6


def test_what_is_promising_is_not_paused():
    pauses = Pauses()
    for _ in range(100):
        assert pauses.drafts()
        pauses.observe(0.2, 1.0, promising=True)
    assert (pauses.begun, pauses.gain < 0.3) == (0, True)
    pauses.observe(0.2, 1.0)
    assert not pauses.drafts()


def test_the_step_after_a_try_waits_for_it_once():
    pauses = Pauses()
    assert pauses.drafts()
    pause(pauses)  # the outcome of the try does not come
    assert [pauses.drafts() for _ in range(4)] == [False, True, True, True]
