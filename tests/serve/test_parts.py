"""Faults, tally, environment and the process, without a model where none is needed."""

from __future__ import annotations

import pytest
import torch

from treeverify import env
from treeverify.engine.engine import Engine
from treeverify.engine.verify import VerifyBatch, ours
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError
from treeverify.integrations.sglang.plugin import create
from treeverify.ops.tree_attention.difference import ROW_EDGES
from treeverify.serve.faults import plant
from treeverify.serve.server import Setup, application
from treeverify.serve.tally import Tally

HEADS = 4


def batch(nodes: int = 3, requests: int = 2) -> VerifyBatch:
    empty = torch.zeros(requests + 1, dtype=torch.int64)
    return VerifyBatch(nodes, empty, torch.zeros(0, dtype=torch.int64), None, tuple(range(requests)))


def tally() -> Tally:
    return Tally(HEADS, "split_kv", torch.device("cpu"))


def test_the_edges_are_those_of_the_plugin():
    from treeverify.integrations.sglang.counters import EDGES

    assert ROW_EDGES == EDGES


def test_a_tally_counts_rows_in_bfloat16_ulp_and_remembers_the_worst():
    count, one = tally(), batch()
    expected = torch.ones(6, HEADS, 8)  # a ULP of bfloat16 at 1 is 2**-7
    got = expected.clone()
    got[4, 2, 5] += 3 * 2.0**-7
    count.served(VerifyMode.VALIDATE, one)
    count.compared(7, one, expected, got)
    count.compared(7, one, expected, expected)
    state = count.state()
    (layer,) = state.layers
    assert (layer.layer, layer.calls, layer.rows, layer.mismatched_rows) == (7, 2, 48, 0)
    assert (layer.max_row_ulp, layer.worst_node, layer.worst_head) == (3.0, 4 % 3, 2)
    assert layer.histogram == [47, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert layer.max_relative == pytest.approx(3 * 2.0**-7 / 8**0.5)
    assert state.breaches == 1
    assert (state.served["validate"].calls, state.served["validate"].rows) == (1, 24)


def test_a_call_that_raised_counts_as_mismatched_rows_and_a_breach():
    count, one = tally(), batch()
    count.compared(0, one, torch.ones(6, HEADS, 8), None)
    (layer,) = count.state().layers
    assert (layer.mismatched_rows, layer.rows, count.state().breaches) == (24, 24, 1)


def test_a_fault_breaks_its_layer_only_and_knows_the_next_step():
    broken = plant("nan-head", lambda q, d, p, b, s: (torch.zeros(2, HEADS, 8), torch.zeros(2, HEADS)))
    row = torch.zeros(0)
    for step in (batch(), batch()):
        broke = [bool(broken(row, row, row, step, 1.0)[0].isnan().any()) for _ in range(4)]
        assert broke == [False, True, False, False]


def test_faults_are_refused_outside_serve_and_unknown_ones_inside(monkeypatch):
    monkeypatch.setenv("TREEVERIFY_FAULT", "scaled")
    for elsewhere in (lambda: env.refuse_fault("a test"), lambda: Engine(None), lambda: create(None)):
        with pytest.raises(ConfigError, match="only treeverify serve plants"):
            elsewhere()
    monkeypatch.setenv("TREEVERIFY_FAULT", "nothing")
    with pytest.raises(ConfigError, match=r"TREEVERIFY_FAULT: expected one of wrong-mask.*'nothing'"):
        application(Setup())
    with pytest.raises(ConfigError, match="wrong-mask"):
        plant("", ours(None))


@pytest.mark.parametrize(("setup", "word"), [({"dtype": "float16"}, "dtype"), ({"draft": "bush"}, "draft")])
def test_bad_setups_are_one_line(setup, word):
    with pytest.raises(ConfigError, match=word):
        application(Setup(**setup))
