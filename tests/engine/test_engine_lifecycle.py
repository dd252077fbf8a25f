"""Waiting, refusal, retraction, streaming, abort; and no slot is ever lost."""

from __future__ import annotations

import pytest
import torch
from tests.toy.models import CONTEXT, VOCAB, ToyDrafter, ToyTarget, expected

from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import FinishReason, Request, SamplingParams
from treeverify.errors import CapacityError, ConfigError, ContractError, PoolCorruption

LONG = SamplingParams(max_new_tokens=30, stop_token_ids=(), seed=0)


def engine(slots=300, **config) -> Engine:
    return Engine(ToyTarget(), ToyDrafter(), config=EngineConfig(slots=slots, verify="off", **config))


def drain(machine: Engine) -> None:
    while machine.busy:
        machine.step()
        machine.audit()


def test_slots_are_scattered_from_the_start_and_by_seed():
    def slots_of(seed: int) -> list[int]:
        machine = engine(pool_seed=seed)
        request = machine.submit(list(range(2, 22)), LONG)
        machine.step()
        return machine._requests[request].slots[:20].tolist()

    assert slots_of(0) != sorted(slots_of(0))
    assert slots_of(0) == slots_of(0) != slots_of(1)


def test_a_request_that_does_not_fit_waits_its_turn():
    machine = engine(slots=72)
    first = machine.submit([3] * 20, LONG, budget=8)  # starts with 29 slots
    second = machine.submit([4] * 35, LONG, budget=8)  # would start with 44
    third = machine.submit([5], LONG, draft="none")  # would fit at once, but not before the second
    machine.step()
    assert [r.id for r in machine._scheduler.running] == [first]
    order = []
    while machine.busy:
        order += [output.request_id for output in machine.step() if output.finish]
        machine.audit()
    assert order[0] == first
    assert machine.result(second).tokens == expected([4] * 35, LONG)
    assert machine.result(third).tokens == expected([5], LONG)


@pytest.mark.parametrize("draft", ["none", "tree"])
def test_memory_pressure_retracts_the_youngest_and_loses_no_token(draft):
    machine = engine(slots=70)
    texts = [[7, 8, 9], [10, 11], [12] * 5]
    ids = [machine.submit(text, LONG, draft=draft, budget=12 if draft == "tree" else None) for text in texts]
    told: dict[int, list[int]] = {request: [] for request in ids}
    while machine.busy:
        for output in machine.step():
            told[output.request_id] += output.tokens
        machine.audit()
    results = [machine.result(request) for request in ids]
    assert results[0].retractions == 0
    assert sum(result.retractions for result in results) == machine.metrics.retractions > 0
    for text, result in zip(texts, results, strict=True):
        assert result.tokens == told[result.request_id] == expected(text, LONG)


def test_what_can_never_fit_is_refused_at_submit():
    machine = engine(slots=40)
    with pytest.raises(CapacityError, match="needs up to 49 slots"):
        machine.submit([3] * 20, LONG, budget=8)
    with pytest.raises(CapacityError, match=f"context of {CONTEXT}"):
        machine.submit([3] * CONTEXT, LONG)
    assert not machine.busy
    exact = SamplingParams(max_new_tokens=21, stop_token_ids=())
    assert len(machine.generate([3] * 20, exact, budget=8).tokens) == 21  # 20 + 21 - 2 + 1 = 40: just fits


def test_one_new_token_needs_no_step():
    machine = engine(slots=20)
    once = SamplingParams(max_new_tokens=1)
    assert machine.generate([3] * 20, once, budget=64).tokens == expected([3] * 20, once)
    assert machine.metrics.steps == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token"),
        ([3, VOCAB], r"prompt_ids\[1\]"),
        ([-1], r"prompt_ids\[0\]"),
        ([1.5], r"prompt_ids\[0\]"),
        ([True], r"prompt_ids\[0\]"),
    ],
)
def test_bad_prompts_are_refused_by_position(prompt, message):
    with pytest.raises(ContractError, match=message):
        engine().submit(prompt)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": 0},
        {"min_p": 1.5},
        {"seed": -1},
        {"seed": 2**64},
        {"max_new_tokens": 0},
        {"stop_token_ids": (-1,)},
    ],
)
def test_bad_sampling_parameters_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        SamplingParams(**values)


def test_bad_drafts_and_settings_are_refused():
    machine = engine()
    with pytest.raises(ConfigError, match="one of none, chain, tree"):
        machine.submit([3], draft="forest")
    for budget in (-1, 260, 1.0):
        with pytest.raises(ConfigError, match="budget"):
            machine.submit([3], draft="tree", budget=budget)
    with pytest.raises(ConfigError, match="needs a drafter"):
        Engine(ToyTarget(), config=EngineConfig(slots=100)).submit([3], draft="chain")
    with pytest.raises(ConfigError, match="stop_token_ids"):
        machine.submit([3], SamplingParams(stop_token_ids=(VOCAB,)))
    for name in ("slots", "max_batch", "prefill_chunk"):
        with pytest.raises(ConfigError, match=name):
            EngineConfig(**{name: 0})
    assert not machine.busy


def test_an_engine_without_a_drafter_decodes_plainly():
    machine = Engine(ToyTarget(), config=EngineConfig(slots=100, verify="off"))
    assert machine.generate([3, 4], LONG, draft="none").tokens == expected([3, 4], LONG)


def test_streams_yield_what_steps_commit():
    machine = engine()
    other = machine.submit([9, 9], LONG)
    pieces = list(machine.stream([3, 4, 5], LONG, budget=16))
    assert max(map(len, pieces)) > 1
    assert [token for piece in pieces for token in piece] == expected([3, 4, 5], LONG)
    assert machine.finish(other).tokens == expected([9, 9], LONG)
    assert machine.audit().held == {}


def test_closing_a_stream_aborts_it():
    machine = engine()
    stream = machine.stream([3, 4, 5], LONG)
    next(stream)
    assert machine.audit().held
    stream.close()
    assert not machine.busy
    assert machine.audit().held == {}


def test_abort_at_any_time():
    machine = engine(slots=60, prefill_chunk=4)
    running, waiting = machine.submit([3] * 20, LONG, budget=8), machine.submit([4] * 20, LONG, budget=8)
    machine.step()  # the first is in the middle of its prefill
    assert machine.abort(waiting)
    assert machine.result(waiting).finish is FinishReason.ABORT
    assert machine.abort(running)
    assert not machine.abort(running)
    assert machine.audit().held == {}
    assert machine.result(running).tokens == []
    assert not machine.abort(running)
    third = machine.submit([5] * 20, LONG, budget=8)
    for _ in range(8):
        machine.step()
    machine.abort(third)
    tokens = machine.result(third).tokens
    assert tokens
    assert tokens == expected([5] * 20, LONG)[: len(tokens)]
    assert machine.audit().available == 60


def test_results_are_given_once_and_only_when_ready():
    machine = engine()
    request = machine.submit([3], LONG)
    with pytest.raises(ContractError, match="has ended"):
        machine.result(request)
    machine.finish(request)
    with pytest.raises(ContractError, match="not yet forgotten"):
        machine.result(request)


def test_nan_logits_are_refused_by_place_and_can_be_aborted():
    class Broken(ToyTarget):
        def forward(self, ids, positions, kv, attend, **options):
            logits, features = super().forward(ids, positions, kv, attend, **options)
            bad = positions == 7
            if len(logits) == len(ids) and bad.any():
                logits = logits.clone()
                logits[bad.nonzero()[0, 0], 4] = torch.nan
            return logits, features

    machine = Engine(Broken(), ToyDrafter(), config=EngineConfig(slots=100, verify="off"))
    request = machine.submit([3, 4, 5], LONG, draft="none")
    with pytest.raises(ContractError, match=f"request {request}, node 0, token id 4"):
        machine.finish(request)
    machine.audit()
    assert machine.abort(request)
    assert machine.audit().held == {}


def test_the_audit_notices_a_slot_listed_by_the_wrong_request():
    machine = engine()
    one, two = machine.submit([3] * 4, LONG), machine.submit([4] * 4, LONG)
    machine.step()
    machine._requests[one].slots[0] = machine._requests[two].slots[0]
    with pytest.raises(PoolCorruption, match=f"request {one}"):
        machine.audit()


def test_a_retracted_request_returns_before_those_that_waited():
    machine = engine(slots=60, max_batch=2)
    first, second = machine.submit([7] * 9, LONG, budget=20), machine.submit([8] * 9, LONG, budget=20)
    third = machine.submit([9], LONG, budget=20)
    ended = []
    while machine.busy:
        ended += [output.request_id for output in machine.step() if output.finish]
        running = [request.id for request in machine._scheduler.running]
        assert running == sorted(running)
    assert machine.result(second).retractions > 0
    assert ended.index(first) < ended.index(second)
    assert third in ended


def test_taking_tokens_cuts_at_the_limit_and_at_a_stop():
    def fresh() -> Request:
        machine = engine()
        return machine._requests[machine.submit([3], SamplingParams(max_new_tokens=4, stop_token_ids=(5,)))]

    request = fresh()
    assert request.take([7, 8]) == [7, 8]
    assert request.finish is None
    assert request.take([9, 10, 11]) == [9, 10]
    assert request.finish is FinishReason.LENGTH
    request = fresh()
    assert request.take([7, 5, 8]) == [7, 5]
    assert request.finish is FinishReason.STOP
    request = fresh()
    assert request.take([7, 8, 9, 5]) == [7, 8, 9, 5]
    assert request.finish is FinishReason.STOP


def test_no_node_is_verified_deeper_than_the_tokens_that_remain():
    machine = engine()
    two = SamplingParams(max_new_tokens=2, stop_token_ids=())
    machine.generate([3, 4, 5], two, draft="tree", budget=8)
    assert machine.metrics.nodes == 1  # one token from prefill, one from a root that needs no draft
