"""The engine's law of tokens 2 to 4 against the exact one, and three planted bugs that the same test must find."""

from __future__ import annotations

from functools import cache

import pytest

from treeverify.errors import ConfigError, ParityError
from treeverify.models.pair import load_pair
from treeverify.parity.engine_law import (
    ALPHA,
    CASES,
    SEEDS,
    correct,
    draw,
    exact_law,
    examine,
    law_engine,
    request_seed,
)
from treeverify.parity.planted import BUGS, plant
from treeverify.parity.replay import Replay

pytestmark = pytest.mark.slow
NULL_SEEDS, NULL_DRAWS = (1, 2), 1000  # per prompt; the recorded run draws ten times as many
BUG_DRAWS = 500
SHARP, PEAKED = CASES[0], CASES[1]  # T=1 top-k 8, and T=0.7, where a greedy walk is hardest to tell


@cache
def pair():
    return load_pair()[:2]


@cache
def replay() -> Replay:
    return Replay(*pair())


@cache
def law(case):
    return exact_law(pair()[0], case)


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c.setting))
def test_the_exact_law_has_cells_enough(case):
    values = law(case).values()
    assert sum(values) == pytest.approx(1.0, abs=1e-12)
    assert sum(20_000 * p >= 5 for p in values) >= 30


def test_the_engine_draws_from_the_exact_law():
    results = correct([examine(replay(), law(case), case, NULL_SEEDS, NULL_DRAWS) for case in CASES])
    found = {str(r.case.setting): (r.worst, r.pooled) for r in results}
    assert all(r.pooled.draws == len(NULL_SEEDS) * NULL_DRAWS for r in results)
    assert all(r.acceptance_length > 1.3 for r in results), "too few tokens came from the trees to say anything"
    assert min(r.worst for r in results) > ALPHA, found


@pytest.mark.parametrize("case", [SHARP, PEAKED], ids=lambda c: str(c.setting))
@pytest.mark.parametrize("name", BUGS)
def test_each_planted_bug_is_found(name, case):
    result = examine(replay(), law(case), case, (7,), BUG_DRAWS, planted=name)
    assert result.worst < 1e-6
    assert result.tests[0].frequency_p_value < 1e-6, "only found by its impossible tokens"


def test_seeds_of_all_draws_differ():
    seeds = {request_seed(seed, case, n) for seed in SEEDS for case in CASES for n in range(500)}
    assert len(seeds) == len(SEEDS) * len(CASES) * 500


def test_an_unknown_bug_and_a_short_draw_are_refused():
    engine = law_engine(replay())
    with pytest.raises(ConfigError, match="sibling-bias"):
        plant(engine, "something else")
    submit = engine.submit
    engine.submit = lambda prompt, params, **how: submit(  # a request that ends a token early
        prompt, type(params)(temperature=1.0, seed=1, max_new_tokens=3, stop_token_ids=()), **how
    )
    with pytest.raises(ParityError, match="fewer"):
        draw(engine, SHARP, 1, 1)
