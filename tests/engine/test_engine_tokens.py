"""Speculation loses nothing: on an exact toy every draft mode, batch and verify mode gives the oracle's tokens."""

from __future__ import annotations

import numpy as np
import pytest
from tests.toy.models import CONTEXT, VOCAB, NoisyDrafter, ToyDrafter, ToyTarget, expected

from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import FinishReason, SamplingParams

DRAFTS = [("none", None), ("chain", None), ("chain", 3), ("tree", 0), ("tree", 1), ("tree", 8), ("tree", 70)]
GREEDY = SamplingParams(max_new_tokens=40, seed=1)
LAWS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=3, max_new_tokens=40),
    SamplingParams(temperature=0.7, top_p=0.8, seed=4, max_new_tokens=40),
    SamplingParams(temperature=1.5, top_k=3, min_p=0.1, seed=2**62 + 5, max_new_tokens=40),
]


def engine(drafter=None, **config) -> Engine:
    settings = {"slots": 2000, "verify": "off"} | config
    return Engine(ToyTarget(), drafter or ToyDrafter(), config=EngineConfig(**settings))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, size=rng.integers(1, 30)).tolist() for _ in range(count)]


CASES = [(draft, params, "off") for draft in DRAFTS for params in LAWS]
CASES += [(draft, params, mode) for draft in DRAFTS[-2:] for params in LAWS[:2] for mode in ("on", "validate")]


@pytest.mark.parametrize(("draft", "params", "mode"), CASES, ids=lambda case: getattr(case, "temperature", None))
def test_every_draft_gives_the_oracles_tokens(draft, params, mode):
    machine = engine(verify=mode)
    for prompt in prompts(2):
        result = machine.generate(prompt, params, draft=draft[0], budget=draft[1])
        assert result.tokens == expected(prompt, params)
        assert sum(result.acceptance_lengths) == len(result.tokens) - 1
        assert machine.audit().available == 2000


@pytest.mark.parametrize("params", LAWS[:2], ids=["greedy", "sampled"])
def test_a_batch_of_many_lengths_equals_each_alone(params):
    machine = engine(max_batch=7, prefill_chunk=16)
    texts = prompts(12, seed=1)
    drafts = [DRAFTS[i % len(DRAFTS)] for i in range(len(texts))]
    ids = [machine.submit(t, params, draft=d, budget=b) for t, (d, b) in zip(texts, drafts, strict=True)]
    while machine.busy:
        machine.step()
        machine.audit()
    for text, request in zip(texts, ids, strict=True):
        assert machine.result(request).tokens == expected(text, params)
    assert machine.audit().held == {}


def test_the_drafts_are_used_and_rows_are_moved():
    machine = engine()
    for prompt in prompts(6):
        machine.generate(prompt, GREEDY, draft="tree", budget=16)
    assert machine.metrics.mean_acceptance > 1.8
    assert machine.metrics.moved_rows > 10
    chain = engine()
    for prompt in prompts(6):
        chain.generate(prompt, GREEDY, draft="chain")
    assert 1.2 < chain.metrics.mean_acceptance < machine.metrics.mean_acceptance
    assert chain.metrics.moved_rows == 0


def test_a_useless_drafter_costs_steps_only():
    machine = engine(NoisyDrafter())
    for prompt in prompts(3):
        assert machine.generate(prompt, GREEDY, budget=4).tokens == expected(prompt, GREEDY)
    assert machine.metrics.mean_acceptance < 1.6


@pytest.mark.parametrize("new", range(1, 14))
def test_max_new_tokens_inside_an_accepted_path_cuts_there(new):
    params = SamplingParams(max_new_tokens=new)
    machine = engine(ToyDrafter(skill=1.0))
    result = machine.generate([3, 4, 5], params, budget=16)
    assert result.tokens == expected([3, 4, 5], GREEDY)[:new]
    assert result.finish is FinishReason.LENGTH
    assert sum(machine.metrics.acceptance.elements()) == sum(result.acceptance_lengths) == new - 1


def test_a_stop_token_inside_an_accepted_path_cuts_there():
    whole = expected([3, 4, 5], GREEDY)
    machine = engine(ToyDrafter(skill=1.0))
    inside = given = 0
    for position, token in enumerate(whole):
        stop = SamplingParams(max_new_tokens=40, stop_token_ids=(token,))
        result = machine.generate([3, 4, 5], stop, budget=16)
        assert result.tokens == whole[: whole.index(token) + 1]
        assert result.finish is FinishReason.STOP
        given += len(result.tokens) - 1  # the first one is prefill's
        assert sum(machine.metrics.acceptance.elements()) == given
        inside += position == whole.index(token) and result.acceptance_lengths[-1:] not in ([], [6])
    assert inside > 5


def test_no_stop_token_means_none_not_the_models():
    for seed in range(40):
        params = SamplingParams(temperature=3.0, seed=seed, max_new_tokens=40)
        if len(expected([5], params)) < 40:
            break
    free = SamplingParams(temperature=3.0, seed=seed, max_new_tokens=40, stop_token_ids=())
    assert engine().generate([5], params).finish is FinishReason.STOP
    assert engine().generate([5], free).finish is FinishReason.LENGTH


def test_the_context_is_filled_to_its_last_position():
    prompt = prompts(1)[0]
    params = SamplingParams(max_new_tokens=10_000, stop_token_ids=())
    for draft, budget in DRAFTS:
        result = engine().generate(prompt, params, draft=draft, budget=budget)
        assert len(result.tokens) == CONTEXT - len(prompt)
        assert result.tokens == expected(prompt, params)
        assert result.finish is FinishReason.LENGTH


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_prefill_chunks_change_nothing(chunk):
    prompt = prompts(1, seed=9)[0] * 2
    machine = engine(prefill_chunk=chunk)
    assert machine.generate(prompt, GREEDY).tokens == expected(prompt, GREEDY)
    assert machine.target.forwards[0] == min(chunk, len(prompt))


def test_a_seed_is_chosen_and_named_when_none_is_given():
    params = SamplingParams(temperature=1.0, max_new_tokens=20)
    machine = engine()
    first, second = machine.generate([4], params), machine.generate([4], params)
    assert first.seed != second.seed
    assert first.tokens == expected([4], SamplingParams(temperature=1.0, max_new_tokens=20, seed=first.seed))
