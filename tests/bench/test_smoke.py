from __future__ import annotations

import signal

import pytest
import torch

from treeverify.bench import rivals, smoke
from treeverify.bench.rivals import Implementation, Missing
from treeverify.bench.workloads import Point, make_pool, pool_slots

POINT = Point(2, 3, 2, 40)
CPU = torch.device("cpu")


def pool():
    return make_pool(pool_slots([POINT], 2), CPU)


def test_a_right_implementation_gets_its_error_and_time():
    line, good = smoke.check_one(rivals.load("treeverify-split_kv"), POINT, pool(), "scatter")
    assert good
    assert "us  error 1." in line
    assert line.split()[0] == "2"


def fails(*_):
    raise RuntimeError("CUDA error:\nan illegal memory access")


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (fails, "FAILED in preparation: RuntimeError: CUDA error: an illegal memory access"),
        (lambda work: [fails] * 2, "FAILED in call: RuntimeError"),
        (lambda work: [lambda: torch.ones(6, 2, 512)] * 2, "WRONG"),
        (lambda work: [lambda: torch.full((6, 2, 512), torch.nan)] * 2, "WRONG"),
    ],
)
def test_a_failure_names_its_stage(prepare, expected):
    line, good = smoke.check_one(Implementation("fa2-mla", ("scatter",), True, prepare), POINT, pool(), "scatter")
    assert not good
    assert expected in line


def test_a_child_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rivals, "load", lambda name: Missing(name, "ImportError: none"))
    assert smoke.run_child("fa2-mla", [POINT], tmp_path / "turns", CPU) == 1
    assert "missing: ImportError: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "seconds", "expected"),
    [
        ("import os; print('first line', flush=True); os.kill(os.getpid(), 11)", 600, "FAILED: SIGSEGV"),
        ("import signal, time; signal.alarm(1); time.sleep(1800)", 600, "FAILED: killed: it held the device too long"),
        ("raise SystemExit('no such device')", 600, "FAILED: no such device"),
        ("import time; time.sleep(1800)", 1, "FAILED: killed: out of time"),
    ],
)
def test_a_child_that_dies_leaves_a_line(tmp_path, monkeypatch, capsys, program, seconds, expected):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {smoke.sys.executable} -c "{program}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(smoke.sys, "executable", str(python))
    assert smoke.main(["--implementations", "fa2-mla", "--seconds", str(seconds), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert expected in out
    assert ("first line" in out) == ("SIGSEGV" in expected)
    assert "1 failed" in out


def test_a_turn_ends_its_alarm(tmp_path):
    with smoke._turn(tmp_path / "turns"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
