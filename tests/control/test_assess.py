from __future__ import annotations

import json
from typing import Any

import pytest
from tests.control.stub import BACKEND, rank, state

from treeverify.control.assess import breaches, problems
from treeverify.control.schema import PluginState
from treeverify.env import VerifyMode

LEFT = {**BACKEND, "left_to_parent": {"option sinks": 4}}


def _read(*groups: dict[str, Any]) -> list[PluginState]:
    return [PluginState.model_validate_json(json.dumps(group)) for group in groups]


GOOD = _read(state(), state())


def test_a_server_that_serves_what_it_says_has_no_problem() -> None:
    assert problems(GOOD, GOOD, None) == problems(GOOD, GOOD, VerifyMode.VALIDATE) == []


def test_off_needs_no_backend() -> None:
    off = _read(state(rank(0, mode="off", backends=[], allowed=["off"])))
    assert problems(off, off, VerifyMode.OFF) == []


@pytest.mark.parametrize("mode", ["validate", "on"])
def test_a_mode_that_should_serve_without_a_backend_is_a_problem(mode: str) -> None:
    empty = _read(state(rank(0, mode=mode, backends=[])))
    assert problems(empty, empty, None) == [f"group 0, rank 0: mode {mode}, but no backend of ours"]


def test_every_rank_with_another_mode_than_expected_is_named() -> None:
    found = problems(GOOD, GOOD, VerifyMode.ON)
    assert found == [f"group {g}, rank {r}: mode validate, expected on" for g in (0, 1) for r in (0, 1)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((state(rank(0), rank(1, mode="on")),), "ranks have different modes: on; validate"),
        ((state(), state(rank(0, mode="on"))), "ranks have different modes: on; validate"),
        ((state(), {**state(), "version": "9"}), "ranks have different versions: 0.1.0; 9"),
        (
            (state(rank(0), rank(1, backends=[{**BACKEND, "kernel": "naive"}])),),
            "ranks have different kernels: naive; portable",
        ),
    ],
)
def test_ranks_that_disagree_are_a_problem(groups: tuple[dict[str, Any], ...], message: str) -> None:
    states = _read(*groups)
    assert problems(states, states, None) == [message]


def test_calls_left_to_the_parent_count_only_while_they_grow() -> None:
    before, after = _read(state(rank(0))), _read(state(rank(0, backends=[LEFT])))
    assert problems(after, after, None) == []
    (found,) = problems(after, before, None)
    assert found == "group 0, rank 0: 4 calls left to SGLang's kernel while it was watched (option sinks)"


def test_a_backend_that_has_served_nothing_in_its_mode_and_left_calls_is_a_problem() -> None:
    served = {**BACKEND["served"], "validate": {"calls": 0, "rows": 0}}
    captured = _read(state(rank(0, backends=[{**LEFT, "served": served}])))
    (found,) = problems(captured, captured, None)
    assert found == "group 0, rank 0: nothing served in mode validate, calls left to SGLang's kernel (option sinks)"
    idle = _read(state(rank(0, backends=[{**BACKEND, "served": served}])))
    assert problems(idle, idle, None) == []


def test_in_mode_off_every_call_is_the_parents() -> None:
    before = _read(state(rank(0, mode="off")))
    after = _read(state(rank(0, mode="off", backends=[LEFT])))
    assert problems(after, before, None) == []


def test_breaches_are_those_of_all_ranks() -> None:
    bad = {**BACKEND, "breaches": 2}
    assert breaches(_read(state(), state(rank(0, backends=[bad, bad]), rank(1, backends=[bad])))) == 6
    assert breaches(GOOD) == 0
