from __future__ import annotations

import pytest
import torch

from treeverify.integrations.sglang.counters import EDGES, Counters
from treeverify.ops.tree_attention.difference import compare

LIVE = torch.ones(6, dtype=torch.bool)


def _pair(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    expected = torch.randn(6, 2, 512, generator=generator).mul_(scale).bfloat16()
    got = (expected.float() * (1 + 0.01 * torch.randn(6, 2, 512, generator=generator))).bfloat16()
    return expected, got


@pytest.mark.parametrize("scale", [1.0, 1e-3, 3e4])
def test_figures_are_those_of_the_comparison_on_the_host(scale: float) -> None:
    expected, got = _pair(scale)
    counters = Counters(1, expected.device)
    counters.record(0, expected, got, LIVE)
    (figures,) = counters.read()
    difference = compare(expected, got)
    assert figures["max_abs"] == pytest.approx(difference.max_abs)
    assert figures["max_row_ulp"] == pytest.approx(difference.max_row_ulp)
    assert (figures["rows"], figures["mismatched_rows"]) == (12, 0)


def test_equal_outputs_fill_bin_zero() -> None:
    expected, _ = _pair()
    counters = Counters(2, expected.device)
    counters.record(1, expected, expected.clone(), LIVE)
    (figures,) = counters.read()
    assert figures["layer"] == 1
    assert figures["histogram"] == [12] + [0] * len(EDGES)


def test_a_row_lands_in_the_bin_of_its_largest_error() -> None:
    expected = torch.ones(6, 2, 512).bfloat16()  # spacing 2**-7 at 1
    got = expected.clone()
    got[0, 0, 3] += 1.5 * 2**-6  # 3 ULP
    counters = Counters(1, expected.device)
    counters.record(0, expected, got, LIVE)
    histogram = counters.read()[0]["histogram"]
    assert histogram[EDGES.index(4.0)] == 1
    assert histogram[0] == 11


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_counts_only_where_the_two_differ(value: float) -> None:
    expected, got = _pair()
    got[2, 1, 7] = value
    expected[4, 0, 0] = got[4, 0, 0] = value
    counters = Counters(1, expected.device)
    counters.record(0, expected, got, LIVE)
    (figures,) = counters.read()
    assert figures["mismatched_rows"] == 1
    assert figures["max_abs"] < 1


def test_padding_is_left_out() -> None:
    expected, got = _pair()
    got[5] = float("nan")
    live = LIVE.clone()
    live[5] = False
    counters = Counters(1, expected.device)
    counters.record(0, expected, got, live)
    (figures,) = counters.read()
    assert (figures["rows"], figures["mismatched_rows"]) == (10, 0)


def test_figures_accumulate_over_calls() -> None:
    expected, got = _pair()
    counters = Counters(1, expected.device)
    counters.record(0, expected, got, LIVE)
    worst = counters.read()[0]["max_abs"]
    counters.record(0, expected, expected, LIVE)
    (figures,) = counters.read()
    assert (figures["calls"], figures["rows"], figures["max_abs"]) == (2, 24, worst)
