"""What is added to SGLang's functions: each once, guarded alike, whoever is added first. No SGLang needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from treeverify.control.wire import STATE_KEY
from treeverify.integrations.sglang import additions, hooks
from treeverify.integrations.sglang.ddtree import hooks as ddtree


def working() -> dict[str, object]:
    return {"steps": 3}


def raising() -> dict[str, object]:
    raise RuntimeError("counters are gone")


FAULT = {"error": "RuntimeError: counters are gone"}


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> type:
    class Scheduler:
        asked = 0

        def get_internal_state(self, recv_req: object) -> SimpleNamespace:
            type(self).asked += 1
            return SimpleNamespace(internal_state={"tp_size": 1})

        def run_batch(self, batch: object) -> object:
            return batch

        set_internal_state = run_batch

    monkeypatch.setattr(ddtree, "find", lambda _: Scheduler)
    monkeypatch.setattr(hooks, "gather", lambda _, make: [make(0)])
    return Scheduler


def add_verify(scheduler: type, server: Callable[[], dict[str, object]], rank: Callable[[], object] = dict) -> None:
    providers = hooks.Providers(lambda _: rank(), lambda _: server(), lambda _: None, lambda: None)
    additions.wrap(scheduler, "get_internal_state", "verify", lambda stock: hooks._with_report(stock, providers))


def ask(scheduler: type) -> dict[str, object]:
    state: dict[str, object] = scheduler().get_internal_state(None).internal_state
    return state


@pytest.mark.parametrize("first", ["verify", "ddtree"])
@pytest.mark.parametrize(
    ("verify", "tree", "expected"),
    [
        (working, working, ({"steps": 3}, {"steps": 3})),
        (raising, working, (FAULT, {"steps": 3})),
        (working, raising, ({"steps": 3}, FAULT)),
        (raising, raising, (FAULT, FAULT)),
    ],
)
def test_a_report_that_raises_is_named_and_takes_nothing_else_with_it(
    scheduler: type, first: str, verify: Any, tree: Any, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # a second time changes nothing
        if first == "verify":
            add_verify(scheduler, verify)
        ddtree.add_to_report("ddtree", tree)
        add_verify(scheduler, verify)
    assert ask(scheduler) == {"tp_size": 1, STATE_KEY: expected[0], "ddtree": expected[1]}
    assert scheduler.asked == 1
    raised = [verify, tree].count(raising)
    assert caplog.text.count("observing failed, serving goes on") == raised


def test_a_group_that_cannot_be_asked_is_named_too(scheduler: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(*_: object) -> None:
        raise ConnectionError("rank 1 is gone")

    monkeypatch.setattr(hooks, "gather", gather)
    add_verify(scheduler, working)
    ddtree.add_to_report("ddtree", working)
    assert ask(scheduler) == {
        "tp_size": 1,
        STATE_KEY: {"error": "ConnectionError: rank 1 is gone"},
        "ddtree": {"steps": 3},
    }


def test_a_rank_that_raises_is_named(scheduler: type) -> None:
    add_verify(scheduler, working, rank=raising)
    assert ask(scheduler)[STATE_KEY] == {"error": "rank 0: RuntimeError: counters are gone"}


def test_the_servers_own_errors_are_its_own(scheduler: type) -> None:
    def fail(self: object, recv_req: object) -> None:
        raise ValueError("SGLang's")

    scheduler.get_internal_state = fail  # type: ignore[attr-defined]
    ddtree.add_to_report("ddtree", working)
    with pytest.raises(ValueError, match="SGLang's"):
        ask(scheduler)


def test_what_is_replaced_keeps_its_signature_whoever_replaces_it(scheduler: type) -> None:
    for whose in ("verify", "ddtree", "verify"):
        additions.wrap(scheduler, "run_batch", whose, lambda stock: lambda *given: [stock(*given)])
    assert list(inspect.signature(scheduler.run_batch).parameters) == ["self", "batch"]  # type: ignore[attr-defined]
    assert scheduler().run_batch(5) == [[5]], "each replaced it once"


class Request:
    """As much of SGLang's request as is read."""

    def __init__(self, given: int, *, ended: bool = False, retracted: bool = False) -> None:
        self.output_ids, self.finished_len = [7] * given, None
        self.is_retracted, self.ended = retracted, ended

    def finished(self) -> bool:
        return self.ended


def process(requests: list[Request], path: int, limit: int, worker: Any) -> list[Request]:
    """One step that accepts ``path`` tokens of each request; texts end after ``limit``."""

    def stock(processor: Any, batch: Any, result: Any) -> None:
        for request in batch.reqs:
            if request.ended or request.is_retracted:
                continue
            request.output_ids.extend([7] * path)
            if len(request.output_ids) >= limit:
                request.ended, request.finished_len = True, limit

    batch = SimpleNamespace(reqs=requests)
    ddtree._with_count(stock)(SimpleNamespace(model_worker=worker), batch, None)
    return requests


def test_tokens_behind_an_end_are_not_counted() -> None:
    counted: list[list[int]] = []
    worker = SimpleNamespace(count=counted.append)
    requests = [Request(1), Request(7), Request(10, ended=True), Request(4, retracted=True), Request(9)]
    process(requests, path=3, limit=10, worker=worker)
    assert counted == [[3, 3, 1]]
    assert [len(request.output_ids) for request in requests] == [4, 10, 10, 4, 12]
    process(requests, path=3, limit=10, worker=worker)
    assert counted[1:] == [[3]]


def test_a_count_that_raises_ends_no_step(caplog: pytest.LogCaptureFixture) -> None:
    def count(_: list[int]) -> None:
        raise OSError("no space left")

    (request,) = process([Request(1)], path=3, limit=10, worker=SimpleNamespace(count=count))
    assert len(request.output_ids) == 4
    odd: Any = SimpleNamespace(output_ids=[7], ended=False, is_retracted=False)  # says not whether it has finished
    process([odd], path=3, limit=10, worker=SimpleNamespace(count=count))
    assert len(odd.output_ids) == 4
    assert caplog.text.count("serving goes on") == 2
