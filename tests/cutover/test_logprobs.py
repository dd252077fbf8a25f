"""A server that refuses log-probabilities: found before anything is touched, or gone on with by consent."""

from __future__ import annotations

import json

import pytest
from tests.cutover.test_bad_input import refuse, snapshot
from tests.cutover.test_kill import judge_for_real

WITHOUT = "--without-logprobs"
UNKNOWN = {"logprob", "top-1", "top-k", "kl"}


@pytest.fixture
def refusing(bench):
    bench.base["STUB_LOGPROBS"] = "0"
    judge_for_real(bench)
    return bench


def verdicts(bench):
    return {(verdict["stage"], verdict["gate"]): verdict for verdict in bench.status()["verdicts"]}


def test_it_is_told_before_anything_is_touched(refusing):
    refusing.boot()
    before = snapshot(refusing)[:2]
    for more in ([], ["--dry-run"]):
        outcome = refusing.run("on", *more, closed="real")
        refuse(refusing, outcome, 9, "HTTP 400", "not with this algorithm", "nothing was changed", WITHOUT)
    assert snapshot(refusing)[:2] == before
    assert not refusing.state.exists()
    assert refusing.run("off").code == 0  # asks nothing


def test_a_server_that_answers_no_request_at_all_is_another_matter(refusing):
    refusing.base["STUB_BROKEN"] = "1"
    refusing.boot()
    refuse(refusing, refusing.run("on", closed="real"), 12, "/generate: HTTP 500")
    assert not refusing.state.exists()


def test_with_consent_the_rest_is_judged_and_what_is_not_is_said(refusing):
    left = UNKNOWN | {"speed"}  # without a threshold here
    refusing.boot()
    assert "not judged: logprob, top-1, top-k, kl" in refusing.run("on", WITHOUT, "--dry-run").out
    outcome = refusing.run("on", WITHOUT, closed="real")
    assert outcome.code == 0, outcome.out
    assert refusing.modes() == ("on", "on")
    found = verdicts(refusing)
    assert {gate for (_, gate), verdict in found.items() if verdict["passed"] is None} == left
    assert all(verdict["passed"] for (_, gate), verdict in found.items() if gate not in left)
    assert {"parity", "shapes", "errors", "mode", "acceptance", "speed", "generation"} <= {gate for _, gate in found}
    assert "  not judged kl: " in outcome.out
    page = next(refusing.state.glob("*/parity-report.html"))
    assert page.read_text().count('<span class="unknown">not judged</span>') == len(left)
    assert "Every judged gate is open" in page.read_text()
    content = json.loads(page.with_suffix(".json").read_text())
    assert {word.partition(" ")[0] for word in content["verdict"]["not_judged"]} == left
    assert {v["gate"] for v in content["verdicts"] if v["passed"] is None} == left


def test_texts_that_part_are_listed_and_not_called_near_ties(refusing):
    refusing.base["STUB_PARTS"] = "1"
    refusing.boot()
    outcome = refusing.run("on", WITHOUT, closed="real")
    assert outcome.code == 0, outcome.out
    found = verdicts(refusing)["on", "generation"]
    assert found["passed"] is None
    assert (found["figures"]["not_judged"], found["figures"]["near_ties"], found["figures"]["same"]) == (4, 0, 0)
    assert "line 1 at token 4" in found["reason"]


def test_with_log_probabilities_the_same_texts_are_faults(bench):
    bench.base["STUB_PARTS"] = "1"
    judge_for_real(bench)
    bench.boot()
    outcome = bench.run("on", closed="real", page=False)
    assert outcome.code == 20, outcome.out
    assert "generation: line 1: token 4: the gap moved" in outcome.last


def test_consent_does_not_open_other_gates(refusing):
    settings = json.loads((refusing.folder / "settings.json").read_text())
    settings["limits"]["rows"] = 1_000_000
    (refusing.folder / "settings.json").write_text(json.dumps(settings))
    refusing.boot()
    outcome = refusing.run("on", WITHOUT, closed="real", page=False)
    assert outcome.code == 20, outcome.out
    assert "rows compared" in outcome.last
    assert refusing.modes() == ("off", "off")
