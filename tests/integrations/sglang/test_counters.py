from __future__ import annotations

import json

import pytest
import torch

from treeverify.control.schema import LayerCounts, ModeCounts
from treeverify.env import VerifyMode
from treeverify.errors import ContractError
from treeverify.integrations.sglang.counters import BOUND_ULP, EDGES, MISMATCHED, Counters
from treeverify.ops.tree_attention.difference import compare

BATCH, NODES, HEADS = 2, 3, 2
TOKENS = BATCH * NODES
LIVE = torch.ones(TOKENS, dtype=torch.bool)
CPU = torch.device("cpu")


def _pair(scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    expected = torch.randn(TOKENS, HEADS, 512, generator=generator).mul_(scale).to(dtype)
    noise = 0.01 * torch.randn(TOKENS, HEADS, 512, generator=generator)
    return expected, (expected.float() * (1 + noise)).to(dtype)


def _ones() -> tuple[torch.Tensor, torch.Tensor]:
    """Equal rows of ones: one ULP is 2**-7."""
    expected = torch.ones(TOKENS, HEADS, 512).bfloat16()
    return expected, expected.clone()


def _counters(layers: int = 1) -> Counters:
    return Counters(layers, NODES, HEADS, CPU)


def _record(expected: torch.Tensor, got: torch.Tensor, live: torch.Tensor = LIVE) -> dict[str, object]:
    counters = _counters()
    counters.record(0, expected, got, live, NODES)
    (figures,) = counters.read()["layers"]
    LayerCounts.model_validate(figures)
    json.dumps(figures, allow_nan=False)
    return figures


@pytest.mark.parametrize("scale", [1.0, 1e-3, 3e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_figures_are_those_of_the_comparison_on_the_host(scale: float, dtype: torch.dtype) -> None:
    expected, got = _pair(scale, dtype)
    figures, difference = _record(expected, got), compare(expected, got)
    assert figures["max_abs"] == pytest.approx(difference.max_abs)
    assert figures["max_relative"] == pytest.approx(difference.max_relative, rel=1e-5)
    coarse = 1 if dtype is torch.bfloat16 else 2**16  # the host counts float32 in its own, finer ULP
    assert figures["max_row_ulp"] == pytest.approx(difference.max_row_ulp / coarse)
    node, head = figures["worst_node"], figures["worst_head"]
    those = (tensor[node::NODES, head : head + 1] for tensor in (expected, got))
    assert compare(*those).max_row_ulp == difference.max_row_ulp
    assert (figures["rows"], figures["mismatched_rows"]) == (TOKENS * HEADS, 0)


def test_a_call_of_padding_alone_is_none() -> None:
    """As in the warm-up of a graph, or on a rank that has no request."""
    counters = _counters()
    expected, got = _pair()
    counters.record(0, expected, got, torch.zeros_like(LIVE), NODES)
    assert counters.read()["layers"] == []
    counters.record(0, expected, got, LIVE, NODES)
    assert [layer["calls"] for layer in counters.read()["layers"]] == [1]


def test_equal_outputs_fill_bin_zero_and_have_no_worst_row() -> None:
    expected, _ = _pair()
    counters = _counters(2)
    counters.record(1, expected, expected.clone(), LIVE, NODES)
    (figures,) = counters.read()["layers"]
    assert figures["layer"] == 1
    assert figures["histogram"] == [TOKENS * HEADS] + [0] * len(EDGES)
    assert (figures["worst_node"], figures["worst_head"]) == (-1, -1)
    assert (figures["max_abs"], figures["max_row_ulp"], figures["max_relative"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("node", range(NODES))
@pytest.mark.parametrize("head", range(HEADS))
def test_a_row_lands_in_the_bin_of_its_largest_error_and_is_named(node: int, head: int) -> None:
    expected, got = _ones()
    got[NODES + node, head, 3] += 1.5 * 2**-6  # 3 ULP, in the second request
    got[0, 0, 0] += 2**-7  # 1 ULP
    figures = _record(expected, got)
    assert (figures["worst_node"], figures["worst_head"]) == (node, head)
    assert figures["max_row_ulp"] == 3.0
    assert figures["histogram"][EDGES.index(4.0)] == 1


def test_the_worst_row_stays_the_worst_over_calls() -> None:
    expected, got = _ones()
    got[1, 1, 3] += 3 * 2**-7
    slightly = expected.clone()
    slightly[2, 0, 0] += 2**-7
    counters = _counters()
    for have in (got, slightly, expected):
        counters.record(0, expected, have, LIVE, NODES)
    (figures,) = counters.read()["layers"]
    assert (figures["worst_node"], figures["worst_head"], figures["max_row_ulp"]) == (1, 1, 3.0)
    assert (figures["calls"], figures["rows"]) == (3, 3 * TOKENS * HEADS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_counts_only_where_the_two_differ(value: float) -> None:
    expected, got = _pair()
    got[2, 1, 7] = value
    expected[4, 0, 0] = got[4, 0, 0] = value
    figures = _record(expected, got)
    assert figures["mismatched_rows"] == 1
    assert figures["max_abs"] < 1


@pytest.mark.parametrize(("one", "other"), [("nan", "inf"), ("inf", "-inf"), ("-inf", "nan")])
def test_different_values_that_are_not_finite_are_mismatched(one: str, other: str) -> None:
    expected, got = _ones()
    expected[0, 0, 0], got[0, 0, 0] = float(one), float(other)
    assert _record(expected, got)["mismatched_rows"] == 1


def test_the_rest_of_a_row_with_the_same_nan_is_still_compared() -> None:
    expected, got = _ones()
    expected[0, 0, 0] = got[0, 0, 0] = float("nan")
    got[0, 0, 1] += 2**-6
    figures = _record(expected, got)
    assert (figures["mismatched_rows"], figures["max_row_ulp"]) == (0, 2.0)


def test_rows_that_are_all_nan_in_both_agree() -> None:
    expected, got = _ones()
    expected[0] = got[0] = float("nan")
    figures = _record(expected, got)
    assert (figures["mismatched_rows"], figures["histogram"][0]) == (0, TOKENS * HEADS)


def test_minus_zero_is_zero() -> None:
    expected = torch.zeros(TOKENS, HEADS, 512).bfloat16()
    figures = _record(expected, -expected)
    assert (figures["max_row_ulp"], figures["max_relative"], figures["mismatched_rows"]) == (0.0, 0.0, 0)


def test_a_baseline_row_of_zeros_gives_finite_figures() -> None:
    expected, got = torch.zeros(TOKENS, HEADS, 512).bfloat16(), torch.ones(TOKENS, HEADS, 512).bfloat16()
    figures = _record(expected, got)
    assert 1e30 < figures["max_row_ulp"] <= MISMATCHED
    assert 1e30 < figures["max_relative"] <= MISMATCHED


def test_values_whose_norm_overflows_give_finite_figures() -> None:
    expected = torch.full((TOKENS, HEADS, 512), 1e38).bfloat16()
    figures = _record(expected, expected * 1.5)
    assert figures["max_row_ulp"] < 100
    assert figures["max_relative"] == MISMATCHED


def test_padding_is_left_out() -> None:
    expected, got = _ones()
    got[5] = float("nan")
    got[4] = 1e9
    live = LIVE.clone()
    live[4:] = False
    figures = _record(expected, got, live)
    assert (figures["rows"], figures["mismatched_rows"], sum(figures["histogram"])) == (8, 0, 8)
    assert figures["max_abs"] < 1
    counters = _counters()
    assert counters.record(0, expected, got, live, NODES)[4:].eq(0).all()
    assert counters.read()["breaches"] == 0


def test_a_row_at_the_bound_is_no_breach_and_one_beyond_it_is() -> None:
    expected, got = _ones()
    got[0, 0, 0] += BOUND_ULP * 2**-7
    counters = _counters()
    counters.record(0, expected, got, LIVE, NODES)
    assert counters.read()["breaches"] == 0
    got[0, 0, 0] += 2**-7
    score = counters.record(0, expected, got, LIVE, NODES)
    assert counters.read()["breaches"] == 1
    assert (score > BOUND_ULP).nonzero().tolist() == [[0, 0]]


def test_a_mismatched_row_is_a_breach_that_is_counted_once_per_call() -> None:
    expected, got = _ones()
    got[0] = float("nan")
    counters = _counters(2)
    for layer in (0, 1, 1):
        score = counters.record(layer, expected, got, LIVE, NODES)
    assert counters.read()["breaches"] == 3
    assert score[0].eq(MISMATCHED).all()
    assert score[1:].eq(0).all()


def test_calls_and_rows_are_counted_by_mode() -> None:
    counters, live = _counters(), LIVE.clone()
    live[0] = False
    counters.count(VerifyMode.ON, live, HEADS)
    counters.count(VerifyMode.ON, LIVE, HEADS)
    counters.count(VerifyMode.VALIDATE, live, HEADS)
    served = counters.read()["served"]
    assert {name: ModeCounts.model_validate(counts) for name, counts in served.items()} == {
        "off": ModeCounts(calls=0, rows=0),
        "validate": ModeCounts(calls=1, rows=10),
        "on": ModeCounts(calls=2, rows=22),
    }


def test_without_waiting_the_newest_snapshot_is_read() -> None:
    expected, got = _pair()
    counters = _counters()
    counters.record(0, expected, got, LIVE, NODES)
    assert counters.read(wait=False)["layers"] == []
    counters.snapshot()
    counters.record(0, expected, got, LIVE, NODES)
    assert counters.read(wait=False)["layers"][0]["calls"] == 1
    assert counters.read()["layers"][0]["calls"] == 2


def test_a_call_with_fewer_nodes_is_counted_by_its_own_nodes() -> None:
    expected, got = (tensor[:4] for tensor in _ones())
    got[3, 1, 0] += 2**-6
    counters = _counters()
    counters.record(0, expected, got, LIVE[:4], 2)
    (figures,) = counters.read()["layers"]
    assert (figures["worst_node"], figures["worst_head"], figures["rows"]) == (1, 1, 8)


@pytest.mark.parametrize(("heads", "nodes"), [(HEADS + 1, NODES), (HEADS, TOKENS), (HEADS, 4)])
def test_shapes_it_was_not_made_for_are_refused(heads: int, nodes: int) -> None:
    rows = torch.ones(TOKENS, heads, 512)
    with pytest.raises(ContractError, match=r"Counters\.record: shape"):
        _counters().record(0, rows, rows, LIVE, nodes)


def test_inputs_are_not_changed() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        expected, got = _pair(dtype=dtype)
        expected[0, 0, 0] = float("nan")
        before = expected.clone(), got.clone()
        _counters().record(0, expected, got, LIVE, NODES)
        assert all(
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, (expected, got), strict=True)
        )
