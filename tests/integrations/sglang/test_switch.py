"""The live switch: what is asked for, what is refused, and that all ranks change or none."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import make_switch

from treeverify.control import client
from treeverify.control.wire import MODE_KEY, STATE_KEY
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError, ServerError
from treeverify.integrations.sglang import compat, hooks, modes

OFF, VALIDATE, ON = VerifyMode


def test_the_switch_reads_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_current", None)
    monkeypatch.setenv("KDTREE_VERIFY", "validate")
    monkeypatch.setenv("KDTREE_VERIFY_ALLOW", "off")
    with pytest.raises(ConfigError, match="KDTREE_VERIFY_ALLOW: expected each mode once"):
        modes.current()
    monkeypatch.setenv("KDTREE_VERIFY_ALLOW", "off,validate")
    switch = modes.current()
    assert (switch.mode, switch.allowed, switch.stock) == (VALIDATE, (OFF, VALIDATE), False)
    assert modes.current() is switch


@pytest.mark.parametrize("number", [1, 1.0])
def test_a_mode_is_asked_for_by_its_number(number: float) -> None:
    assert make_switch(OFF, VALIDATE).requested({MODE_KEY: number}) is VALIDATE


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({MODE_KEY: 2}, "expected one of off, validate .*; got on"),
        ({MODE_KEY: 3}, "expected one of 0 off, 1 validate, 2 on; got 3"),
        ({MODE_KEY: -1}, ".*got -1"),
        ({MODE_KEY: 0.5}, ".*got 0.5"),
        ({MODE_KEY: float("nan")}, ".*got nan"),
        (
            {MODE_KEY: 1, "pp_max_micro_batch_size": 8},
            "expected alone in its request, got it with pp_max_micro_batch_size",
        ),
    ],
)
def test_anything_else_is_refused_with_a_reason(values: dict[str, float], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{MODE_KEY}: {reason}"):
        make_switch(OFF, VALIDATE).requested(values)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A scheduler with our hooks and stock functions that answer for themselves; one rank."""
    monkeypatch.setattr(hooks, "gather", lambda _, make: [make(0)])
    monkeypatch.setattr(hooks, "find", lambda path: SimpleNamespace if path == compat.SWITCH_REPLY else None)
    made = SimpleNamespace(forward_ct=41)
    made.set = hooks._with_switch(lambda *_: "stock")
    return made


def _request(**values: float) -> SimpleNamespace:
    return SimpleNamespace(server_args=values)


def test_a_switch_is_answered_and_counted(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = make_switch(OFF, ON)
    monkeypatch.setattr(modes, "_current", switch)
    assert scheduler.set(scheduler, _request(**{MODE_KEY: 2})).updated is True
    assert (switch.mode, switch.switches, switch.switched_at) == (ON, 1, 41)
    assert scheduler.set(scheduler, _request(**{MODE_KEY: 1})).updated is False
    assert (switch.mode, switch.switches) == (ON, 1)
    assert scheduler.set(scheduler, _request(pp_max_micro_batch_size=8)) == "stock"


def test_the_info_carries_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "gather", lambda _, make: [make(0), make(1)])
    providers = hooks.Providers(
        rank=lambda n: f"rank {n}", server=lambda ranks: {"ranks": ranks}, draft=lambda _: None, step=lambda: None
    )
    ask = hooks._with_report(lambda *_: SimpleNamespace(internal_state={"tp_size": 2}), providers)
    assert ask(None, None).internal_state == {"tp_size": 2, STATE_KEY: {"ranks": ["rank 0", "rank 1"]}}


def test_a_rank_that_cannot_say_its_state_holds_up_no_other_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(number: int) -> str:
        if number == 1:
            raise RuntimeError("no space left")
        return f"rank {number}"

    monkeypatch.setattr(hooks, "gather", lambda _, make: [make(0), make(1)])
    providers = hooks.Providers(
        rank=rank, server=lambda ranks: {"ranks": ranks}, draft=lambda _: None, step=lambda: None
    )
    ask = hooks._with_report(lambda *_: SimpleNamespace(internal_state={}), providers)
    entry = ask(None, None).internal_state[STATE_KEY]
    assert entry == {"error": "rank 1: RuntimeError: no space left"}
    assert "serving goes on" in caplog.text
    with pytest.raises(
        ServerError, match=r"treeverify: the server could not say its state: rank 1: RuntimeError: no space left"
    ):
        client._state("http://host/server_info", 0, {STATE_KEY: entry})


def test_what_is_done_beside_serving_never_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    def step() -> None:
        raise OSError("stale file handle")

    run_batch = hooks._with_step(lambda batch: ("result", batch), step)
    assert run_batch("batch") == ("result", "batch")
    assert "stale file handle" in caplog.text


def test_two_ranks_change_together_or_not_at_all(tmp_path: Any) -> None:
    """Real process group; rank 1 does not allow ``validate``, so neither rank may take it."""
    code = textwrap.dedent("""
        import sys
        from types import SimpleNamespace
        import torch.distributed as dist
        from treeverify.control.wire import MODE_KEY
        from treeverify.env import VerifyMode
        from treeverify.integrations.sglang import hooks, modes

        rank, store = int(sys.argv[1]), sys.argv[2]
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        off, validate, on = VerifyMode
        modes._current = modes.Switch(off, (off, validate, on) if rank == 0 else (off, on))
        hooks.find = lambda path: SimpleNamespace
        scheduler = SimpleNamespace(forward_ct=5, server_args=SimpleNamespace(), tp_cpu_group=dist.group.WORLD)
        change = hooks._with_switch(None)
        answers = []
        for number in (1, 2):
            answers.append(change(scheduler, SimpleNamespace(server_args={MODE_KEY: number})).updated)
            answers.append(modes.current().mode.value)
        print(answers, hooks.gather(scheduler, lambda n: n))
    """)
    command = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        assert process.communicate()[0] == "[False, 'off', True, 'on'] [0, 1]\n"
