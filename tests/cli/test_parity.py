"""``treeverify parity law``: what it records, its exit codes, and one clear line for bad input."""

from __future__ import annotations

import json

import pytest

from treeverify.bench.record import read
from treeverify.parity import engine_law


@pytest.fixture
def law(run):
    """Run ``treeverify parity law ARGUMENTS``."""
    return lambda *arguments: run("parity", "law", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plant", "typo"), "greedy-fallback, sibling-bias, draft-law"),
        (("--seeds", "1,x"), "--seeds"),
        (("--seeds", "1,1"), "different"),
        (("--seeds", "-3"), ">= 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(law, arguments, words):
    code, out, err = law(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_run_is_recorded_and_a_planted_bug_fails_it(law, monkeypatch, tmp_path):
    monkeypatch.setattr(engine_law, "CASES", engine_law.CASES[3:4])
    file = tmp_path / "law.jsonl"
    code, out, _ = law("--draws", "200", "--seeds", "1,2", "--out", str(file), "--json")
    assert code == 0, out
    code, out, _ = law("--draws", "200", "--seeds", "1", "--plant", "draft-law", "--out", str(file))
    assert code == 1
    assert "the laws differ" in out
    null, planted = read(file, "law")
    assert null["measures"]["pooled"]["draws"] == 400
    assert [test["draws"] for test in null["measures"]["tests"]] == [200, 200]
    assert json.loads(json.dumps(null)) == null
    assert planted["impl"] == "tree, planted draft-law"
    assert planted["measures"]["pooled_holm"] < 1e-6
