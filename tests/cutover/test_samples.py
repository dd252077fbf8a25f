"""Samples taken from the embedded engine's server, and the gates on them: each planted fault closes one."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from treeverify.control.client import read_state, switch_mode
from treeverify.control.schema import PluginState
from treeverify.cutover import gates, samples
from treeverify.cutover.limits import Limits
from treeverify.cutover.samples import Plan, Sample
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError, ServerUnreachableError
from treeverify.serve.faults import NAMES
from treeverify.serve.server import Setup, application

PLAN = Plan.builtin(2, new_tokens=16, probes=1, probe_tokens=4, speed_passes=1)
LIMITS = Limits(rows=500)


@contextmanager
def served(fault: str | None = None) -> Iterator[str]:
    """The URL of a server in this process, in mode off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDTREE_VERIFY", "off")
        patch.setenv("KDTREE_VERIFY_ALLOW", "off,validate,on")
        patch.delenv("TREEVERIFY_FAULT", raising=False)
        if fault is not None:
            patch.setenv("TREEVERIFY_FAULT", fault)
        app = application(Setup())
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def stage(url: str, mode: VerifyMode) -> tuple[list[PluginState], Sample, list[PluginState]]:
    """Switch, sample: (states before, sample, states after)."""
    before = switch_mode(url, mode)
    return before, samples.collect(url, PLAN), read_state(url)


@pytest.fixture(scope="module")
def baseline() -> Sample:
    told = []
    with served() as url:
        found = samples.collect(url, PLAN, lambda done, total, what: told.append((done, total, what)))
    assert [done for done, _, _ in told] == list(range(1, 7))
    assert {total for _, total, _ in told} == {6}
    return found


def test_a_sample_holds_what_the_plan_asks(baseline):
    assert (baseline.mode, baseline.failures) == ("off", [])
    assert [len(found.positions) for found in baseline.generations] == [16, 16]
    assert [len(found.positions) for found in baseline.probes] == [3, 3]
    assert [(window.run, window.tokens) for window in baseline.speed] == [(0, 16), (0, 16)]
    for found in baseline.generations:
        assert sum(found.accepted) == found.verify_steps
        assert all(position.top[0] == (position.token, position.logprob) for position in found.positions)
    assert Sample.model_validate_json(baseline.model_dump_json()) == baseline


def test_a_right_kernel_passes_validate_and_serves_the_same_texts(baseline):
    with served() as url:
        before, candidate, after = stage(url, VerifyMode.VALIDATE)
        assert [v for v in gates.judge("validate", baseline, candidate, before, after, LIMITS) if not v.passed] == []
        before, candidate, after = stage(url, VerifyMode.ON)
        verdicts = gates.judge("on", baseline, candidate, before, after, LIMITS)
    # two prompts are too few for statistics, and the machine may be busy
    assert {verdict.gate for verdict in verdicts if not verdict.passed} <= {"statistics", "speed"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", NAMES)
def test_each_fault_is_stopped_in_validate_by_the_parity_gate_alone(baseline, fault):
    """``one-head-2ulp`` is the floor: 2 bfloat16 ULP on one head of one layer."""
    with served(fault) as url:
        before, candidate, after = stage(url, VerifyMode.VALIDATE)
    verdicts = gates.judge("validate", baseline, candidate, before, after, LIMITS)
    closed = [verdict for verdict in verdicts if not verdict.passed]
    assert [verdict.gate for verdict in closed] == ["parity"]
    assert ("layer 1" in closed[0].reason) or fault in ("wrong-mask", "scaled")


def test_requests_that_fail_are_lines_of_the_sample(baseline):
    with served("nan-head") as url:
        _, candidate, after = stage(url, VerifyMode.ON)
        verdicts = gates.judge("on", baseline, candidate, after, after, LIMITS)
    assert len(candidate.failures) == 6
    assert candidate.failures[0].startswith("speed pass 0, tkinter/dialog.py: HTTP 500")
    assert candidate.generations == []
    assert not next(verdict for verdict in verdicts if verdict.gate == "errors").passed


def test_a_server_that_cannot_be_asked_is_an_error_before_the_first_request():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServerUnreachableError):
        samples.collect(f"http://127.0.0.1:{port}", PLAN)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"input": "a", "forced": "bcdefg"}\n{"input": 3}', "line 2: .*input"),
        ("not json", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ("[1]", "line 1: expected an object"),
        ('{"input": "a", "forced": [1]}', "line 1: .*two texts or two lists"),
        ('{"input": "a", "forced": "b"}', "forced: expected more than 4"),
        ('{"input": "a", "forced": "bcdefg", "name": "x"}\n' * 2, "names that differ"),
        ('{"input": "a", "forced": "bcdefg", "nmae": "x"}', "line 1: nmae"),
        ("", "at least 1"),
        ('{"input": "\\ud83d", "forced": "bcdefg"}', "line 1: .*input: .*surrogate"),  # no request can hold it
    ],
)
def test_a_bad_file_of_prompts_is_refused_with_its_line(tmp_path, lines, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=words):
        Plan.from_file(path)
    with pytest.raises(ConfigError, match=r"missing\.jsonl: prompts cannot be read"):
        Plan.from_file(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("separator", "\u2028\u2029\u0085")
def test_prompts_may_hold_any_separator(tmp_path, separator):
    path = tmp_path / "prompts.jsonl"
    text = f"one{separator}two"
    path.write_text(json.dumps({"input": text, "forced": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert (Plan.from_file(path).prompts[0].input, Plan.from_file(path).prompts[0].forced) == (text, text)


def test_a_file_of_prompts_in_text_or_ids(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input": "a", "forced": "bcdefg"}\n\n{"input": [1], "forced": [2, 3, 4, 5, 6], "name": "ids"}\n')
    plan = Plan.from_file(path, new_tokens=4)
    assert [prompt.name for prompt in plan.prompts] == ["line 1", "ids"]
    assert plan.prompts[0].upto(2) == "abc"
    assert plan.prompts[1].upto(2) == [1, 2, 3]
    assert plan.new_tokens == 4
