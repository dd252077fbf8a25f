"""off, validate, on: what is served, what is recorded, and that a fault in ours shows in the record alone."""

from __future__ import annotations

import pytest
import torch
from tests.toy.models import LAYERS, ToyDrafter, ToyTarget, expected

from treeverify.engine import verify
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import SamplingParams
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError, ContractError

PARAMS = SamplingParams(max_new_tokens=24, stop_token_ids=())
PROMPT = [3, 4, 5]
REAL = verify.ours(None)


def engine(mode, mine=None) -> Engine:
    return Engine(ToyTarget(), ToyDrafter(), config=EngineConfig(slots=200, verify=mode), mine=mine)


def blind(q, draft_kv, kv_pool, batch, scale):
    """A kernel that forgets the tree mask: every node sees every draft row before it."""
    return REAL(
        q, draft_kv, kv_pool, verify.VerifyBatch(batch.nodes, batch.kv_indptr, batch.kv_indices, None, ()), scale
    )


def one_wrong_row(q, draft_kv, kv_pool, batch, scale):
    out, lse = REAL(q, draft_kv, kv_pool, batch, scale)
    if batch.nodes > 3:
        out = out.clone()
        out[2, 1, 17] += 0.5
    return out, lse


def crashing(q, draft_kv, kv_pool, batch, scale):
    raise ContractError.of("tree_attention", "q", "anything else", "this")


def test_the_environment_names_the_mode(monkeypatch):
    monkeypatch.setenv("KDTREE_VERIFY", "validate")
    assert engine(None).verify_mode is VerifyMode.VALIDATE
    monkeypatch.setenv("KDTREE_VERIFY", "maybe")
    with pytest.raises(ConfigError, match="off, validate, on"):
        engine(None)
    monkeypatch.delenv("KDTREE_VERIFY")
    assert engine(None).verify_mode is VerifyMode.OFF


def test_off_never_calls_ours_and_records_nothing():
    machine = engine("off", mine=crashing)
    assert machine.generate(PROMPT, PARAMS).tokens == expected(PROMPT, PARAMS)
    assert machine.verify_record.calls == 0


def test_on_serves_ours_faults_and_all():
    assert engine("on").generate(PROMPT, PARAMS).tokens == expected(PROMPT, PARAMS)
    with pytest.raises(AssertionError, match="position"):  # the toy notices that a node saw too much
        engine("on", mine=blind).generate(PROMPT, PARAMS)
    with pytest.raises(ContractError, match="anything else"):
        engine("on", mine=crashing).generate(PROMPT, PARAMS)


def test_validate_records_every_layer_of_every_step():
    machine = engine("validate")
    machine.generate(PROMPT, PARAMS)
    record = machine.verify_record
    assert sorted(record.layers) == list(range(LAYERS))
    assert record.calls == LAYERS * machine.metrics.steps
    assert record.rows == 2 * LAYERS * machine.metrics.nodes
    assert record.total.calls == record.calls
    assert record.total.mismatched == record.failures == 0
    assert record.total.max_abs < 1e-5
    assert record.max_lse_abs < 1e-5
    machine.reset_record()
    assert machine.verify_record.calls == 0


@pytest.mark.parametrize("fault", [blind, one_wrong_row])
def test_a_fault_shows_in_the_record_and_not_in_the_tokens(fault):
    machine = engine("validate", mine=fault)
    assert machine.generate(PROMPT, PARAMS, draft="tree", budget=8).tokens == expected(PROMPT, PARAMS)
    record = machine.verify_record
    assert record.total.max_abs > 0.1
    assert record.total.max_row_ulp > 1000
    assert record.worst is not None
    if fault is one_wrong_row:
        assert (record.worst.node, record.worst.head, record.worst.dim) == (2, 1, 17)
        assert "node 2, head 1, dim 17" in str(record.worst)


def test_the_worst_case_names_its_layer_and_request():
    def late(q, draft_kv, kv_pool, batch, scale):
        out, lse = REAL(q, draft_kv, kv_pool, batch, scale)
        late.calls += 1
        if late.calls == 2 * LAYERS:  # the last layer of the second step
            out[batch.nodes + 1, 0, 3] += 1.0  # node 1 of the second request
        return out, lse

    late.calls = 0
    machine = engine("validate", mine=late)
    machine.submit(PROMPT, PARAMS, budget=6)
    second = machine.submit([9], PARAMS, budget=6)
    for _ in range(5):
        machine.step()
    worst = machine.verify_record.worst
    assert worst is not None
    assert (worst.layer, worst.request_id, worst.node) == (LAYERS - 1, second, 1)
    assert worst.ours == pytest.approx(worst.baseline + 1.0)


def test_a_crash_of_ours_is_counted_and_not_served():
    machine = engine("validate", mine=crashing)
    assert machine.generate(PROMPT, PARAMS).tokens == expected(PROMPT, PARAMS)
    assert machine.verify_record.failures == LAYERS * machine.metrics.steps
    assert "anything else" in machine.verify_record.last_failure


def test_the_mode_changes_between_steps():
    machine = engine("off")
    request = machine.submit(PROMPT, PARAMS)
    for index in range(6):
        machine.step()
        machine.set_verify_mode(["validate", "on", "off"][index % 3])
    assert 0 < machine.verify_record.calls < LAYERS * machine.metrics.steps
    assert machine.finish(request).tokens == expected(PROMPT, PARAMS)
    with pytest.raises(ConfigError):
        machine.set_verify_mode("perhaps")


def test_a_target_with_other_rows_is_refused():
    class Narrow(ToyTarget):
        def new_pool(self, slots):
            return torch.empty(2, slots, 288)

    with pytest.raises(ConfigError, match="expected 576"):
        Engine(Narrow(), config=EngineConfig(slots=10))
