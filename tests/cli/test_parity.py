"""``treeverify parity law``: what it records, its exit codes, and one clear line for bad input."""

from __future__ import annotations

import json
import sys

import pytest

from treeverify.bench.record import read
from treeverify.cli.main import main
from treeverify.parity import engine_law


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command; returns (exit code, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["treeverify", "parity", "law", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plant", "typo"), "greedy-fallback, sibling-bias, draft-law"),
        (("--seeds", "1,x"), "--seeds"),
        (("--seeds", "1,1"), "different"),
        (("--seeds", "-3"), ">= 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_run_is_recorded_and_a_planted_bug_fails_it(run, monkeypatch, tmp_path):
    monkeypatch.setattr(engine_law, "CASES", engine_law.CASES[3:4])
    file = tmp_path / "law.jsonl"
    code, out, _ = run("--draws", "200", "--seeds", "1,2", "--out", str(file), "--json")
    assert code == 0, out
    code, out, _ = run("--draws", "200", "--seeds", "1", "--plant", "draft-law", "--out", str(file))
    assert code == 1
    assert "the laws differ" in out
    null, planted = read(file, "law")
    assert null["measures"]["pooled"]["draws"] == 400
    assert [test["draws"] for test in null["measures"]["tests"]] == [200, 200]
    assert json.loads(json.dumps(null)) == null
    assert planted["impl"] == "tree, planted draft-law"
    assert planted["measures"]["pooled_holm"] < 1e-6
