"""What a callback may do inside a step: it never meets the engine half way, and no slot is lost."""

from __future__ import annotations

import pytest
from tests.toy.models import ToyDrafter, ToyTarget, expected

from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import FinishReason, SamplingParams
from treeverify.engine.verify import baseline
from treeverify.env import VerifyMode
from treeverify.errors import ContractError

LONG = SamplingParams(max_new_tokens=30, stop_token_ids=(), seed=0)
TEXTS = [[3, 4, 5], [6] * 9, [7, 8]]
PLACES = ("observer", "verify", "drafter", "target", "prefill", "kernel")


class Told:
    """A verify observer that calls what it was given."""

    def __init__(self, call) -> None:
        self.call, self.modes = call, []

    def served(self, mode, batch) -> None:
        self.modes.append(mode)
        self.call()

    def compared(self, *_) -> None: ...


def engine_that_calls(place: str, call, slots: int = 300) -> Engine:
    """An engine whose code at ``place`` runs ``call`` in each step."""

    class Target(ToyTarget):
        def forward(self, ids, positions, kv, attend, **options):
            if place == ("prefill" if options.get("rows") is not None else "target"):
                call()
            return super().forward(ids, positions, kv, attend, **options)

    class Drafter(ToyDrafter):
        def draft(self, *arguments):
            if place == "drafter":
                call()
            return super().draft(*arguments)

    def mine(*arguments):
        if place == "kernel":
            call()
        return baseline(*arguments)

    machine = Engine(Target(), Drafter(), config=EngineConfig(slots=slots, verify="on"), mine=mine)
    if place == "observer":
        machine.metrics.observer = lambda *_: call()
    if place == "verify":
        machine.observe_verify(Told(call))
    return machine


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("slots", [300, 45], ids=["roomy", "some wait"])
@pytest.mark.parametrize("place", PLACES)
def test_an_abort_inside_a_step_ends_the_request_with_it(place, slots, victim):
    said: list[bool] = []
    machine = engine_that_calls(place, lambda: said.append(machine.abort(ids[victim])), slots)
    ids = [machine.submit(text, LONG, budget=8) for text in TEXTS]
    told: dict[int, list[int]] = {request: [] for request in ids}
    ends: dict[int, FinishReason] = {}
    while machine.busy:
        outputs = machine.step()
        machine.audit()
        assert not said or machine.ended(ids[victim]), "it outlived the step"
        for output in outputs:
            told[output.request_id] += output.tokens
            if output.finish is not None:
                ends[output.request_id] = output.finish
    assert said[0] is True
    assert machine.audit().held == {}
    for request, text in zip(ids, TEXTS, strict=True):
        result = machine.result(request)
        gone = request == ids[victim]
        assert result.finish is (FinishReason.ABORT if gone else FinishReason.LENGTH)
        assert ends.get(request, result.finish) is result.finish
        assert result.tokens == told[request]
        assert result.tokens == expected(text, LONG)[: len(result.tokens)]
        assert gone or len(result.tokens) == 30


def test_an_abort_of_what_ends_in_that_step_changes_nothing():
    said: list[bool] = []
    machine = engine_that_calls("target", lambda: said.append(machine.abort(request)))
    request = machine.submit([3, 4, 5], SamplingParams(max_new_tokens=2, stop_token_ids=()))
    result = machine.finish(request)
    assert (result.finish, len(result.tokens), said) == (FinishReason.LENGTH, 2, [True])
    assert machine.audit().held == {}
    said.clear()
    machine = engine_that_calls("observer", lambda: said.append(machine.abort(request)))
    request = machine.submit([3, 4, 5], SamplingParams(max_new_tokens=2, stop_token_ids=()))
    assert (machine.finish(request).finish, said) == (FinishReason.LENGTH, [False])


def test_an_error_after_an_abort_leaves_no_slot_behind():
    def fail() -> None:
        machine.abort(request)
        raise RuntimeError("an observer's own")

    machine = engine_that_calls("observer", fail)
    request = machine.submit([3, 4, 5], LONG)
    with pytest.raises(RuntimeError, match="an observer's own"):
        machine.finish(request)
    assert machine.result(request).finish is FinishReason.ABORT
    assert (machine.busy, machine.audit().held) == (False, {})


def test_an_error_in_the_step_that_finishes_a_request_leaves_no_slot_behind():
    def fail() -> None:
        raise RuntimeError("an observer's own")

    machine = engine_that_calls("observer", fail)
    request = machine.submit([3, 4, 5], SamplingParams(max_new_tokens=2, stop_token_ids=()))
    with pytest.raises(RuntimeError, match="an observer's own"):
        machine.finish(request)
    assert machine.result(request).finish is FinishReason.LENGTH
    assert (machine.busy, machine.audit().held) == (False, {})


def test_a_stream_closed_inside_a_step_is_aborted():
    machine = engine_that_calls("target", lambda: other is not None and stream.close())
    other, stream = None, machine.stream([3, 4, 5], LONG)
    next(stream)
    other = machine.submit([6] * 9, LONG)
    assert machine.finish(other).tokens == expected([6] * 9, LONG)
    assert machine.audit().held == {}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["step", "finish", "generate", "stream"])
def test_a_step_inside_a_step_is_refused(place, name):
    calls = {
        "step": lambda: machine.step(),
        "finish": lambda: machine.finish(longer),
        "generate": lambda: machine.generate([9], LONG),
        "stream": lambda: next(machine.stream([9], LONG)),
    }
    refused: list[str] = []

    def call() -> None:
        with pytest.raises(ContractError, match="expected to be called between steps") as error:
            calls[name]()
        refused.append(str(error.value))

    machine = engine_that_calls(place, call)
    request = machine.submit([3, 4, 5], LONG, budget=8)
    longer = machine.submit([3], SamplingParams(max_new_tokens=60, stop_token_ids=()), draft="none")
    while not machine.ended(request):
        machine.step()
        machine.audit()
    assert machine.result(request).tokens == expected([3, 4, 5], LONG)
    assert refused
    machine.abort(longer)
    assert machine.audit().held == {}


def test_what_is_submitted_inside_a_step_runs_after_it():
    born: list[int] = []
    machine = engine_that_calls("verify", lambda: born or born.append(machine.submit([9], LONG, budget=4)))
    first = machine.submit([3, 4, 5], LONG, budget=8)
    assert machine.finish(first).tokens == expected([3, 4, 5], LONG)
    assert machine.finish(born[0]).tokens == expected([9], LONG)


def test_a_mode_asked_for_inside_a_step_holds_from_the_next_one_on():
    """Requests of two budgets are verified in two calls of one step: both in the mode that it began with."""
    told = Told(lambda: machine.set_verify_mode("off"))
    machine = Engine(ToyTarget(), ToyDrafter(), config=EngineConfig(slots=300, verify="on"))
    machine.observe_verify(told)
    for budget in (4, 8):
        machine.submit([3, 4, 5], LONG, budget=budget)
    machine.step()
    assert machine.verify_mode is VerifyMode.OFF
    assert told.modes == [VerifyMode.ON] * 2
    machine.step()
    assert told.modes[2:] == [VerifyMode.OFF] * 2
