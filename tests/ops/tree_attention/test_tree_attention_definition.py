"""Both implementations against the definition, spelt out with Python loops; and the corner cases it decides."""

from __future__ import annotations

import math

import pytest
import torch
from cases import SCALE, assert_matches, build
from implementations import IMPLEMENTATIONS

from treeverify.ops.tree_attention.reference import tree_attention_reference

BOTH = pytest.mark.parametrize("name", ["reference", "split_kv"])


def brute_force(case):
    """One (token, head) at a time, one key at a time, in Python floats."""
    q, draft, pool, indptr, indices = (t.double() if t.is_floating_point() else t for t in case.tensors)
    nodes = case.options["nodes"]
    out = torch.zeros(q.shape[0], q.shape[1], 512, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for token in range(q.shape[0]):
        request, node = divmod(token, nodes)
        keys = [pool[int(indices[i])].flatten() for i in range(int(indptr[request]), int(indptr[request + 1]))]
        keys += [draft[request * nodes + j].flatten() for j in range(nodes) if case.visible[request, node, j]]
        for head in range(q.shape[1]):
            scores = [float(torch.dot(q[token, head], key)) * case.options["scale"] for key in keys]
            if not scores:
                continue
            peak = max(scores)
            weights = [math.exp(score - peak) for score in scores]
            total = sum(weights)
            for weight, key in zip(weights, keys, strict=True):
                out[token, head] += weight / total * key[:512]
            lse[token, head] = peak + math.log(total)
    return out, lse


@pytest.mark.parametrize("form", ["mask", "bits", "ubits", "chain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_small_calls_equal_the_definition(name, dtype, form):
    case = build((3, 0, 17), 6, 2, form=form, dtype=dtype, seed=3)
    assert_matches(case, case.run(IMPLEMENTATIONS[name]), exact=brute_force(case))


@pytest.mark.parametrize("prefixes", [(0,), (1,), (16, 15)])
@pytest.mark.parametrize("nodes", [1, 2, 9, 66])
def test_the_float64_reference_is_the_definition(nodes, prefixes):
    case = build(prefixes, nodes, 1, form="bits", seed=nodes)
    out, lse = case.run(tree_attention_reference)
    want, want_lse = brute_force(case)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize("split", [1, 2, 7, 16, 1000, None])
def test_any_cut_gives_the_same(name, split, monkeypatch):
    monkeypatch.setattr("treeverify.ops.tree_attention.split_kv.TILE_ROWS", 5)
    case = build((33, 0, 7), 9, 2, seed=5)
    assert_matches(case, case.run(IMPLEMENTATIONS[name], fixed_split=split))


@BOTH
def test_a_node_that_sees_nothing_gives_zero_and_minus_infinity(name):
    visible = torch.eye(4, dtype=torch.bool).repeat(2, 1, 1)
    visible[0, 2] = False
    case = build((0, 3), 4, 2, visible=visible)
    out, lse = case.run(IMPLEMENTATIONS[name])
    assert not out[2].any()
    assert bool((lse[2] == -torch.inf).all())
    assert int((lse == -torch.inf).sum()) == 2
    assert_matches(case, (out, lse))


@BOTH
def test_scores_far_from_zero_neither_overflow_nor_vanish(name):
    case = build((40,), 5, 2, seed=8)
    for scale in (SCALE * 100, SCALE * 1e-6):
        far = case.with_options(scale=scale)
        out, lse = far.run(IMPLEMENTATIONS[name])
        want, want_lse = far.exact()
        assert float((out - want).norm() / want.norm()) < 1e-3  # scores reach 500: fp32 keeps them to 3e-5
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@BOTH
def test_an_empty_batch_gives_empty_results(name):
    case = build((), 3, 2, form="chain")
    out, lse = case.run(IMPLEMENTATIONS[name])
    assert out.shape == (0, 2, 512)
    assert lse.shape == (0, 2)


@pytest.mark.parametrize("name", ["split_kv", "api", "api-reference"])
def test_results_are_written_where_the_caller_asks_and_nowhere_else(name):
    case = build((0, 20), 3, 2, dtype=torch.bfloat16)
    buffer = torch.full((8, 3, 600), -7.0, dtype=torch.bfloat16)
    out, lse = buffer[1:7, :2, 16:528], torch.full((6, 2), torch.nan)
    result = case.run(IMPLEMENTATIONS[name], out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    assert_matches(case, (out, lse))
    plain, plain_lse = case.run(IMPLEMENTATIONS[name])
    assert torch.equal(out, plain)
    assert torch.equal(lse, plain_lse)
    out.fill_(-7.0)
    assert bool((buffer == -7.0).all())


def test_results_come_in_the_dtype_of_q():
    case = build((20,), 3, 2, dtype=torch.bfloat16)
    for name in ("split_kv", "api", "api-reference"):
        out, lse = case.run(IMPLEMENTATIONS[name])
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("prefix", [64, 400, 2000])
def test_bfloat16_keeps_the_stated_bound_on_normal_data(prefix):
    case = build((prefix,), 9, 8, dtype=torch.bfloat16, seed=prefix)
    assert_matches(case, case.run(IMPLEMENTATIONS["split_kv"]), bound=2.0e-3)


def test_bfloat16_weights_are_rounded_as_on_tensor_cores():
    """With exact weights the output rounding alone would remain, which is 1.66e-3 and not 1.9e-3."""
    case = build((400,), 9, 8, dtype=torch.bfloat16)
    (out, _), (want, _) = case.run(IMPLEMENTATIONS["split_kv"]), case.exact()
    assert float((out.double() - want).norm() / want.norm()) > 1.75e-3
