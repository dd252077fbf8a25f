"""The comparison of two outputs: figures against hand-made differences, patterns first, accumulation."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treeverify.errors import ParityError
from treeverify.ops.tree_attention.difference import HISTOGRAM_BINS, Difference, Worst, compare

NAN, INF = float("nan"), float("inf")


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_equal_tensors_do_not_differ(dtype):
    a = normal(3, 2, 8, dtype=dtype)
    a[0, 0, 0] = NAN
    a[0, 0, 1] = INF
    d = compare(a, a.clone())
    assert (d.calls, d.elements, d.mismatched, d.max_abs, d.relative, d.max_ulp) == (1, 48, 0, 0.0, 0.0, 0)
    assert d.worst is None
    assert d.histogram == (48, *[0] * (HISTOGRAM_BINS - 1))


def test_one_element_off_is_found_and_measured():
    a = torch.full((4, 3, 8), 1.0)
    b = a.clone()
    b[2, 1, 5] = 1.25
    d = compare(a, b)
    assert d.max_abs == 0.25
    assert d.max_relative == pytest.approx(0.25 / math.sqrt(8))
    assert d.relative == pytest.approx(0.25 / math.sqrt(96))
    assert d.max_row_ulp == 0.25 * 2**23
    assert d.max_ulp == 2**21
    assert d.worst == Worst(0, 2, 1, 5, 1.0, 1.25)
    assert str(d.worst) == "call 0 [token 2, head 1, dim 5]: expected 1, got 1.25"
    assert d.histogram[0] == 95
    assert d.histogram[-1] == 1


def test_a_wrong_row_of_small_values_is_not_hidden_by_large_ones():
    a = normal(64, 8, 512)
    a[5, 3] *= 1e-4
    b = a.clone()
    b[5, 3] = 0
    d = compare(a, b)
    assert d.relative < 1e-4
    assert d.max_relative == 1.0
    assert (d.worst.token, d.worst.head) == (5, 3)


@pytest.mark.parametrize(
    ("expected", "got", "mismatched"),
    [
        (NAN, NAN, 0),
        (INF, INF, 0),
        (-INF, -INF, 0),
        (INF, -INF, 1),
        (NAN, INF, 1),
        (NAN, 1.0, 1),
        (1.0, NAN, 1),
        (1.0, INF, 1),
    ],
)
def test_patterns_of_nan_and_infinity_come_first(expected, got, mismatched):
    a, b = normal(2, 2, 4), normal(2, 2, 4)
    b[0, 0, 0] += 100.0
    a[1, 0, 2], b[1, 0, 2] = expected, got
    d = compare(a, b)
    assert d.mismatched == mismatched
    assert d.max_abs == pytest.approx(100.0, abs=1e-4)
    assert math.isfinite(d.relative)
    place = (d.worst.token, d.worst.head, d.worst.dim)
    assert place == ((1, 0, 2) if mismatched else (0, 0, 0))


def test_a_row_that_should_be_zero():
    a, b = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)
    assert compare(a, b).max_relative == 0.0
    b[0, 0, 1] = 1e-30
    d = compare(a, b)
    assert d.max_relative == INF
    assert d.relative == INF
    assert d.max_row_ulp > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_neighbouring_values_are_one_ulp_apart(dtype):
    a = normal(5, 2, 64, dtype=dtype)
    b = torch.nextafter(a, torch.full_like(a, INF))
    d = compare(a, b)
    assert d.max_ulp == 1
    assert d.max_row_ulp <= 1.0
    assert d.histogram[:2] == (0, 640)


def test_zeros_of_either_sign_are_the_same_and_signs_are_counted_across():
    tiny = torch.tensor([[[2.0**-133, 0.0]]]).bfloat16()
    assert compare(torch.zeros(1, 1, 2), -torch.zeros(1, 1, 2)).max_ulp == 0
    assert compare(tiny, -tiny).max_ulp == 2


def test_the_coarser_dtype_sets_the_unit():
    a = normal(4, 2, 64)
    d = compare(a, a.bfloat16())
    assert d.max_ulp == 0
    assert 0.25 < d.max_row_ulp <= 0.5
    assert compare(a.double(), a).max_ulp == 0


def ordinal(value: float) -> int:
    bits = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


@settings(max_examples=200)
@given(
    a=st.floats(width=32, allow_nan=False, allow_infinity=False),
    b=st.floats(width=32, allow_nan=False, allow_infinity=False),
)
def test_element_distance_is_the_difference_of_ordinals(a, b):
    expected, got = (torch.tensor([[[x]]], dtype=torch.float32) for x in (a, b))
    steps = abs(ordinal(a) - ordinal(b))
    if math.isinf(float((got - expected).abs())):
        return  # the difference itself leaves float32
    d = compare(expected, got)
    assert d.max_ulp == steps
    assert d.histogram[min(steps.bit_length(), HISTOGRAM_BINS - 1)] == 1


def test_merging_equals_comparing_everything_at_once_and_numbers_the_calls():
    pairs = [
        (normal(3, 2, 16, seed=s), normal(3, 2, 16, seed=s) + 1e-3 * normal(3, 2, 16, seed=s + 9)) for s in range(4)
    ]
    total = Difference()
    for a, b in pairs:
        total = total.merge(compare(a, b))
    whole = compare(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))
    assert total.calls == 4
    for name in ("elements", "max_abs", "max_relative", "max_row_ulp", "max_ulp", "histogram"):
        assert getattr(total, name) == getattr(whole, name)
    assert total.relative == pytest.approx(whole.relative)
    worst = total.worst
    assert (3 * worst.call + worst.token, worst.head, worst.dim) == (
        whole.worst.token,
        whole.worst.head,
        whole.worst.dim,
    )


def test_merging_keeps_the_first_mismatch_and_is_associative():
    a = normal(2, 2, 4)
    broken, off = a.clone(), a + 1.0
    broken[1, 1, 1] = NAN
    parts = [compare(a, off), compare(a, broken), compare(a, off), compare(a, broken)]
    left = parts[0].merge(parts[1]).merge(parts[2]).merge(parts[3])
    right = parts[0].merge(parts[1].merge(parts[2].merge(parts[3])))
    assert left == right
    assert left.worst.call == 1
    assert left.mismatched == 2
    assert Difference().merge(parts[0]) == parts[0].merge(Difference()) == parts[0]


def test_the_line_says_it_all():
    a = torch.ones(1, 1, 4)
    b = a.clone()
    b[0, 0, 2] = NAN
    assert "NaN/Inf differ in 1; worst: call 0 [token 0, head 0, dim 2]: expected 1, got nan" in str(compare(a, b))
    assert str(compare(a, a)).endswith("worst: none")


def test_nothing_to_compare_is_no_difference():
    assert compare(torch.zeros(0, 2, 4), torch.zeros(0, 2, 4)) == Difference(calls=1)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2, 2, 4), torch.zeros(2, 2, 5), "same shape"),
        (torch.zeros(2, 4), torch.zeros(2, 4), r"\[tokens, heads, dim\]"),
        (torch.zeros(2, 2, 4).long(), torch.zeros(2, 2, 4), "int64"),
        (torch.zeros(2, 2, 4), torch.zeros(2, 2, 4).half(), "float16"),
        (torch.zeros(2, 2, 4), torch.zeros(2, 2, 4, device="meta"), "one device"),
    ],
)
def test_what_cannot_be_compared_is_refused(a, b, message):
    with pytest.raises(ParityError, match=message):
        compare(a, b)
