"""The engine over a random model of the packaged shape: every mode gives plain decoding's tokens."""

from __future__ import annotations

import pytest
import torch
from tests.toy.checkpoints import drafter_tensors, target_tensors

from treeverify.engine import verify
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import SamplingParams
from treeverify.models.drafter import Drafter
from treeverify.models.target import Target

GREEDY = SamplingParams(max_new_tokens=24, stop_token_ids=())
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_new_tokens=24, stop_token_ids=())


@pytest.fixture(scope="module")
def pair():
    target = Target(*target_tensors())
    return target, Drafter(*drafter_tensors(), target)


def engine(pair, **config) -> Engine:
    return Engine(*pair, config=EngineConfig(**({"slots": 600, "verify": "off"} | config)))


def prompt(length=50, seed=0):
    return torch.randint(2, 2047, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_modes_drafts_and_chunks_agree(pair, params):
    plain = engine(pair).generate(prompt(), params, draft="none").tokens
    for mode in ("off", "validate", "on"):
        machine = engine(pair, verify=mode, prefill_chunk=19, pool_seed=7)
        for draft in ("chain", "tree"):
            assert machine.generate(prompt(), params, draft=draft).tokens == plain
        assert machine.audit().held == {}
        if mode == "validate":
            assert machine.verify_record.total.relative < 1e-5
            assert machine.verify_record.rows == 8 * 4 * machine.metrics.nodes


def test_a_batch_agrees_with_each_alone(pair):
    texts = [prompt(n, seed=n) for n in (3, 40, 17)]
    machine = engine(pair)
    ids = [machine.submit(text, GREEDY, budget=8) for text in texts]
    for text, request in zip(texts, ids, strict=True):
        assert machine.finish(request).tokens == engine(pair).generate(text, GREEDY, draft="none").tokens


def test_the_draft_finds_its_context_where_commits_put_it(pair):
    """After a run, each context row equals the one that a single prefill of the whole text writes."""
    machine = engine(pair)
    request = machine.submit(prompt(20), SAMPLED, draft="tree", budget=16)
    while machine._requests[request].length < 36:
        machine.step()
    state = machine._requests[request]
    fresh = engine(pair, pool_seed=3)
    again = fresh.submit(state.ids[: state.committed].tolist(), GREEDY)
    fresh.step()
    other = fresh._requests[again]
    mine, theirs = state.slots[: state.committed], other.slots[: state.committed]
    got, want = machine._cache, fresh._cache
    torch.testing.assert_close(got.context[mine], want.context[theirs], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.kv[:, mine], want.kv[:, theirs], atol=1e-4, rtol=1e-4)
    assert machine.metrics.steps > 3


def test_a_planted_fault_is_recorded_and_not_served(pair):
    real = verify.ours(None)

    def faulty(q, draft_kv, kv_pool, batch, scale):
        return real(q, draft_kv, kv_pool, batch, scale * 1.01)

    plain = engine(pair).generate(prompt(), GREEDY, draft="none").tokens
    machine = Engine(*pair, config=EngineConfig(slots=600, verify="validate"), mine=faulty)
    assert machine.generate(prompt(), GREEDY, draft="tree", budget=16).tokens == plain
    assert machine.verify_record.total.relative > 1e-4
    assert machine.verify_record.worst is not None
