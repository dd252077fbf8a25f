"""Statistics: exact values, a bound that holds, false alarms and power by simulation on made-up laws."""

from __future__ import annotations

import numpy as np
import pytest
from tests.cutover.synthetic import TOP, VOCAB, position, sample

from treeverify.cutover.limits import Limits
from treeverify.cutover.sample_gates import FAMILY, statistical
from treeverify.cutover.statistics import (
    Pair,
    Risk,
    beyond,
    disagreement,
    divergence,
    forced_pairs,
    histograms,
    logprob_change,
    shorter,
)

RISK = Risk(0.01, 0.8)


def pair(p: np.ndarray, q: np.ndarray) -> Pair:
    return Pair("p", position(p), position(q))


def exact_kl(p: np.ndarray, q: np.ndarray) -> float:
    log_p, log_q = (x - np.log(np.exp(x).sum()) for x in (p, q))
    return float((np.exp(log_p) * (log_p - log_q)).sum())


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.3, 3.0, 10.0])
def test_the_divergence_is_a_lower_bound_and_close_where_the_lists_hold_the_mass(scale):
    random = np.random.default_rng(5)
    for _ in range(50):
        p = random.normal(0, 4, VOCAB)
        q = p + scale * random.normal(0, 1, VOCAB)
        found, exact = divergence(pair(p, q)), exact_kl(p, q)
        assert 0 <= found <= exact + 1e-9
        if scale <= 0.3:
            assert found == pytest.approx(exact, rel=0.1, abs=1e-9)


def test_lists_without_a_common_token_diverge():
    p = np.concatenate([np.full(TOP, 5.0), np.full(TOP, -5.0)])
    assert divergence(pair(p, -p)) > 5
    assert divergence(pair(p, p)) == 0


def test_changes_of_the_baselines_token():
    p = np.linspace(3, -3, VOCAB)
    q = p.copy()
    q[0] -= 1
    found = pair(p, q)
    assert logprob_change(found) == pytest.approx(dict(position(q).top)[0] - found.baseline.logprob)
    assert logprob_change(pair(p, -p)) == position(-p).top[-1][1] - position(p).logprob


def test_only_near_ties_explain_a_token_that_left():
    near, far = np.array([5.0, 4.9, 0, *[-9.0] * 30]), np.array([5.0, 4.0, 0, *[-9.0] * 30])
    swapped = near[[1, 0, *range(2, 33)]]
    assert disagreement(pair(near, swapped), 1, 0.25) == (1.0, 1.0)
    assert disagreement(pair(far, swapped), 1, 0.25) == (1.0, 0.0)
    assert disagreement(pair(near, swapped), 2, 0.25) == (0.0, 0.0)


def test_pairs_end_with_the_first_difference_and_skip_what_prefill_changed():
    baseline = sample(prompts=2)
    first, second, *rest = baseline.probes
    changed = [*first.positions]
    changed[1] = changed[1].model_copy(update={"token": 999})
    candidate = baseline.model_copy(
        update={
            "probes": [
                first.model_copy(update={"positions": changed}),
                second.model_copy(update={"first": 1}),
                *rest,
            ]
        }
    )
    found = forced_pairs(baseline, candidate)
    assert [p.prompt for p in found] == ["p0"] * 2 + ["p1"] * 8
    assert found[1].candidate.token == 999


def test_the_interval_and_the_detectable_effect_are_students():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    found = beyond(x, 0.5, RISK)
    error = x.std(ddof=1) / 2
    assert found.mean == 2.5
    assert (found.low, found.high) == pytest.approx((2.5 - 5.8409 * error, 2.5 + 5.8409 * error), rel=1e-4)
    assert found.p == pytest.approx(0.0267, abs=1e-4)
    assert found.detectable == pytest.approx(0.5 + (4.5407 + 0.9785) * error, rel=1e-3)
    assert beyond(-x, 0.5, RISK).p > 0.9
    assert beyond(-x, 0.5, RISK, both_sides=True).p == pytest.approx(2 * found.p)
    assert beyond([1.0] * 4, 0.5, RISK).p == 0
    assert beyond([0.5] * 4, 0.5, RISK).p == 1


@pytest.mark.parametrize("both_sides", [False, True])
def test_a_mean_at_its_margin_alarms_as_often_as_the_level_says(both_sides):
    random = np.random.default_rng(11)
    alarms = np.mean(
        [beyond(random.normal(1, 2, 20), 1, Risk(0.05, 0.8), both_sides=both_sides).p < 0.05 for _ in range(4000)]
    )
    assert alarms < 0.05 + 3 * (0.05 * 0.95 / 4000) ** 0.5


def test_the_detectable_effect_is_detected_with_the_stated_power():
    random = np.random.default_rng(13)
    risk, n = Risk(0.05, 0.8), 24
    truth = (1.7139 + 0.8569) / n**0.5  # t(0.95) + t(0.8) at 23 degrees, for a spread of 1
    found = np.mean([beyond(random.normal(truth, 1, n), 0, risk).p < 0.05 for _ in range(2000)])
    assert found == pytest.approx(0.8, abs=0.04)  # a non-central t is not quite the shifted one


def test_shorter_acceptance_lengths_are_found_and_longer_or_equal_ones_are_not():
    base = np.tile([2, 3, 5], (16, 1))
    short = np.tile([5, 3, 2], (16, 1))
    assert shorter(base, base) == (0.0, 1.0)
    assert shorter(base, short)[0] == pytest.approx(0.3)
    assert shorter(base, short)[1] < 2e-4
    assert shorter(short, base)[1] > 0.9


def test_permutations_alarm_as_often_as_they_say():
    random = np.random.default_rng(17)
    draws = [shorter(*random.multinomial(20, [0.3, 0.3, 0.4], size=(2, 12)), seed=i)[1] for i in range(200)]
    assert np.mean(np.array(draws) < 0.1) < 0.1 + 3 * (0.1 * 0.9 / 200) ** 0.5


def test_histograms_have_one_width_or_are_not_told():
    found = [
        g.model_copy(update={"accepted": a}) for g, a in zip(sample(prompts=2).generations, ([1], [0, 2]), strict=True)
    ]
    assert histograms(found).tolist() == [[1, 0], [0, 2]]
    assert histograms([found[0], found[1].model_copy(update={"accepted": None})]) is None


def alarms(runs: int, noise: float, fault: float = 0.0) -> float:
    """Share of runs in which any statistical gate closes: both samples with rounding noise, one with a fault's too."""
    closed = 0
    for run in range(runs):
        baseline = sample(run, noise, noise_seed=2 * run)
        candidate = sample(run, (noise**2 + fault**2) ** 0.5, noise_seed=2 * run + 1)
        verdicts = statistical("on", baseline, candidate, Limits())
        assert [verdict.gate for verdict in verdicts] == list(FAMILY)
        closed += not all(verdict.passed for verdict in verdicts)
    return closed / runs


@pytest.mark.slow
def test_false_alarms_are_at_most_one_in_a_hundred_and_a_fault_is_found_with_power():
    """Logits of 16..32 in bfloat16 err by 1/8 / sqrt(12) = 0.036; a fault that moves them by 0.2 makes a KL of 0.02."""
    assert alarms(200, 0.036) <= 0.01
    assert alarms(50, 0.036, fault=0.2) >= 0.8
