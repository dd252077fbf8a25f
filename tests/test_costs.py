"""The cost table: interpolation, monotony, what is no table."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeverify.costs import CostTable
from treeverify.errors import ConfigError

AXES = ((1, 5, 9), (1, 4), (100, 200, 400))


def table(verify=None, draft=None, axes=AXES) -> CostTable:
    rng = np.random.default_rng(0)
    shape = tuple(len(axis) for axis in axes)
    verify = rng.uniform(1, 9, shape) if verify is None else verify
    return CostTable(*axes, verify, rng.uniform(1, 2, shape[1:]) if draft is None else draft)


def test_grid_points_are_what_was_measured_and_points_between_are_linear():
    found = table(np.arange(1.0, 19.0).reshape(3, 2, 3), np.arange(6.0).reshape(2, 3))
    assert found.verify_ms(5, 4, 200) == 11.0
    assert found.plain_ms(1, 400) == 3.0
    assert found.draft_ms(4, 100) == 3.0
    assert found.verify_ms(3, 1, 100) == 4.0  # 1 and 7
    assert found.verify_ms(1, 1, 300) == 2.5
    assert found.verify_ms(1, 2, 100) == 2.0  # 1 and 4, a third of the way
    np.testing.assert_allclose(found.step_ms(1, 100), [1.0, 7.0, 13.0])
    assert found.verify_ms(99, 99, 9999) == 18.0
    assert found.verify_ms(1, 1, 1) == 1.0


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 6), st.integers(1, 500))
def test_more_never_costs_less_however_noisy_the_grid(seed, width, batch, context):
    rng = np.random.default_rng(seed)
    found = table(rng.uniform(1, 9, (3, 2, 3)), rng.uniform(0, 2, (2, 3)))
    here = found.verify_ms(width, batch, context)
    for more in ((1, 0, 0), (0, 1, 0), (0, 0, 37)):
        assert found.verify_ms(width + more[0], batch + more[1], context + more[2]) >= here - 1e-12
        assert found.draft_ms(batch + more[1], context + more[2]) >= found.draft_ms(batch, context) - 1e-12


def test_a_table_survives_json_to_the_bit():
    found = table()
    back = CostTable.of_json(json.loads(json.dumps(found.as_json())))
    assert (back.widths, back.batches, back.contexts) == AXES
    np.testing.assert_array_equal(back.verify, found.verify)
    np.testing.assert_array_equal(back.draft, found.draft)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": [2, 5, 9]}, "begin with 1"),
        ({"widths": [1, 9, 5]}, "rising widths"),
        ({"batches": [4, 1]}, "batches: expected rising"),
        ({"contexts": [0, 1, 2]}, "contexts: expected rising"),
        ({"contexts": []}, "contexts"),
        ({"draft": [[1.0]]}, "draft: expected positive numbers of shape"),
        ({"draft": None}, "draft|not a table"),
        ({"verify": "x"}, "not a table"),
        ({"widths": 3}, "not a table"),
        ({"batches": ["a", "b"]}, "batches"),
    ],
)
def test_what_is_no_table_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        CostTable.of_json({**table().as_json(), **change})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_impossible_times_are_refused(bad):
    verify = np.ones((3, 2, 3))
    verify[1, 1, 1] = bad
    with pytest.raises(ConfigError, match="verify: expected positive numbers"):
        table(verify)
