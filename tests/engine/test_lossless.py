"""The packaged pair in fp32: drafting never changes the text, greedy or sampled, in any verify mode."""

from __future__ import annotations

import pytest

from treeverify.engine import verify
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import SamplingParams
from treeverify.models.heldout import load_heldout
from treeverify.models.pair import load_pair

pytestmark = pytest.mark.slow
PROMPTS, NEW_TOKENS, BATCH = 20, 128, 10
GREEDY = [SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=())] * PROMPTS
SAMPLED = [
    SamplingParams(temperature=0.8, seed=100 + i, max_new_tokens=NEW_TOKENS, stop_token_ids=()) for i in range(5)
]


@pytest.fixture(scope="module")
def pair():
    return load_pair()


@pytest.fixture(scope="module")
def prompts():
    texts = [text.prompt_ids for text in load_heldout()[:PROMPTS]]
    assert len(texts) == PROMPTS
    assert all(len(text) == 128 for text in texts)
    return texts


def machine(pair, mode="on", mine=None) -> Engine:
    return Engine(pair.target, pair.drafter, config=EngineConfig(max_batch=BATCH, verify=mode), mine=mine)


def decode(engine, prompts, params, draft) -> list[list[int]]:
    """The new tokens of each prompt, all submitted at once."""
    requests = [engine.submit(text, p, draft=draft) for text, p in zip(prompts, params, strict=False)]
    tokens = [engine.finish(request).tokens for request in requests]
    assert engine.audit().held == {}
    assert all(len(text) == NEW_TOKENS for text in tokens)
    return tokens


@pytest.fixture(scope="module")
def plain(pair, prompts):
    return decode(machine(pair), prompts, GREEDY, "none")


@pytest.mark.parametrize("draft", ["chain", "tree"])
def test_drafts_give_plain_decodings_tokens_at_temperature_0(pair, prompts, plain, draft):
    engine = machine(pair)
    got = decode(engine, prompts, GREEDY, draft)
    assert [i for i, (a, b) in enumerate(zip(got, plain, strict=True)) if a != b] == []
    assert engine.metrics.mean_acceptance > 2, "too little was accepted to say anything"


def test_drafts_give_plain_decodings_tokens_at_one_seed(pair, prompts):
    texts = prompts[: len(SAMPLED)]
    found = {draft: decode(machine(pair), texts, SAMPLED, draft) for draft in ("none", "chain", "tree")}
    assert found["chain"] == found["none"]
    assert found["tree"] == found["none"]
    assert len({tuple(tokens) for tokens in found["none"]}) == len(SAMPLED)


def test_verify_modes_give_the_same_tokens_and_validate_records(pair, prompts, plain):
    for mode in ("off", "validate", "on"):
        engine = machine(pair, mode)
        assert decode(engine, prompts[:3], GREEDY, "tree") == plain[:3]
        record = engine.verify_record
        assert record.failures == 0
        if mode == "validate":
            assert record.calls == engine.metrics.steps * pair.target.config.num_hidden_layers > 0
            assert record.total.relative < 1e-5
        else:
            assert record.calls == 0


def without_mask(q, draft_kv, kv_pool, batch, scale):
    """A planted fault: the tree is attended as one causal chain, so that siblings see each other."""
    chain = verify.VerifyBatch(batch.nodes, batch.kv_indptr, batch.kv_indices, None, batch.request_ids)
    return verify.ours(None)(q, draft_kv, kv_pool, chain, scale)


def test_a_dropped_mask_changes_the_text_and_validate_sees_it(pair, prompts, plain):
    wrong = decode(machine(pair, "on", without_mask), prompts[:3], GREEDY, "tree")
    assert wrong != plain[:3]
    engine = machine(pair, "validate", without_mask)
    assert decode(engine, prompts[:3], GREEDY, "tree") == plain[:3]  # the baseline is served
    assert engine.verify_record.total.relative > 1e-3
