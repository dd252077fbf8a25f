"""The law tests themselves: exact enumeration, calibration under the null, and power against a wrong law."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from treeverify.errors import ContractError, ParityError
from treeverify.holm import holm
from treeverify.parity.law import exact_joint, goodness_of_fit


def markov_law(prefixes):
    """A three-token chain whose next law depends on the last token; token 2 never follows token 0."""
    table = np.array([[0.7, 0.3, 0.0], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    start = np.array([0.5, 0.25, 0.25])
    return np.stack([table[p[-1]] if p else start for p in prefixes])


def draw(rng, n, length, skip):
    outcomes, law = zip(*exact_joint(markov_law, length, skip=skip).items(), strict=True)
    counts = rng.multinomial(n, np.asarray(law) / sum(law))
    return Counter({outcome: int(count) for outcome, count in zip(outcomes, counts, strict=True)})


def test_exact_joint_is_the_chain_rule_with_the_first_token_summed_out():
    joint = exact_joint(markov_law, 3, skip=1)
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-12)
    by_hand = sum(p0 * p1 * 0.3 for p0, p1 in [(0.5, 0.3), (0.25, 0.5), (0.25, 0.1)])
    assert joint[(1, 2)] == pytest.approx(by_hand, abs=1e-12)
    assert (0, 2) not in joint


def test_exact_joint_refuses_what_it_cannot_enumerate():
    with pytest.raises(ContractError, match="prefixes to expand"):
        exact_joint(markov_law, 6, max_prefixes=50)
    with pytest.raises(ContractError, match="skip"):
        exact_joint(markov_law, 2, skip=2)


def test_null_p_values_are_not_small_and_a_wrong_law_is_found():
    rng = np.random.default_rng(11)
    law = exact_joint(markov_law, 3, skip=1)
    p_values = [goodness_of_fit(draw(rng, 400, 3, 1), law).p_value for _ in range(25)]
    assert min(holm(p_values)) > 0.01
    wrong = dict(law)
    wrong[(0, 0)], wrong[(1, 1)] = law[(0, 0)] - 0.08, law[(1, 1)] + 0.08
    assert goodness_of_fit(draw(rng, 4000, 3, 1), wrong).p_value < 1e-6


def test_an_impossible_outcome_refutes_at_once():
    law = exact_joint(markov_law, 2)
    counts = Counter({outcome: round(1000 * p) for outcome, p in law.items()})
    counts[(0, 2)] += 1
    result = goodness_of_fit(counts, law)
    assert result.impossible == 1
    assert result.p_value == 0.0
    assert result.frequency_p_value > 0.5


def test_rare_outcomes_are_lumped_and_mass_is_kept():
    law = {(0,): 0.5, (1,): 0.4995, (2,): 0.0005}
    result = goodness_of_fit(Counter({(0,): 500, (1,): 499, (2,): 1}), law)
    assert result.cells == 2
    assert result.statistic < 0.01


def test_bad_laws_are_refused():
    with pytest.raises(ParityError, match="sum to 1"):
        goodness_of_fit(Counter({(0,): 10}), {(0,): 0.9})
    with pytest.raises(ParityError, match="at least 2 cells"):
        goodness_of_fit(Counter({(0,): 10}), {(0,): 1.0})


def test_holm_matches_a_hand_computed_case():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
