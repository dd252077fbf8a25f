"""SIGKILL of the tool at every record of its journal: the next start goes on or rolls back.

After each kill, server and next start are in modes that the journal explains: the last that was told, or one that was
about to be. Each loop ends by itself when the command outlives the number of records.
"""

from __future__ import annotations

import itertools
import json

import pytest

pytestmark = pytest.mark.slow
KILLED = -9
EAGER = ("--allow-restart", "--eager", "STUB_EAGER=1")
REAL = {"closed": "real", "page": False}


def explained(records, before=("off", "off")):
    """Modes of server and next start that ``records`` explain; written anew here, from the records alone."""
    known = {"switch": {before[0]}, "files": {before[1]}}
    for record in records:
        if record["event"] in ("intend", "did"):
            which = "files" if record["data"]["act"] == "files" else "switch"
            mode = {record["data"]["mode"]}
            known[which] = mode if record["event"] == "did" else known[which] | mode
    return known["switch"], known["files"]


def assert_explained(bench):
    live, next_start = bench.modes()
    lives, next_starts = explained(bench.records())
    if live != "ServerUnreachableError":  # in the middle of a restart that the journal tells of
        assert live in lives
    else:
        assert bench.records()[-1]["data"].get("act") == "restart"
    assert next_start in next_starts


def assert_ended(bench, outcome, done):
    """The journal's last word, the exit code, the server and its next start say the same."""
    last = bench.records()[-1]
    assert last["event"] == "end"
    expected = {"done": (done, done), "rolled-back": ("off", "off")}[last["stage"]]
    assert bench.modes() == expected
    assert (outcome.code == 0) == (last["stage"] == "done")


def judge_for_real(bench):
    """Have prompts and limits with which the gates themselves pass the stub."""
    prompts = [{"input": [1, n], "forced": list(range(10))} for n in range(4)]
    (bench.folder / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    bench.settings(
        prompts_file=str(bench.folder / "prompts.jsonl"),
        sampling={"new_tokens": 8, "probes": 1, "probe_tokens": 4, "speed_passes": 0},
        limits={"speed_ratio": None, "prompts": 4, "rows": 4000},
    )


def assert_judged_before_on(bench):
    """Written anew from the records: a process that was let into on had passed validate itself."""
    judged = set()
    for record in bench.records():
        if record["event"] == "passed" and record["stage"].startswith("validate"):
            judged |= set(record["data"]["pids"])
        if record["event"] == "passed" and record["stage"] in ("on", "on-eager"):
            assert set(record["data"]["pids"]) <= judged


def kill_everywhere(bench, how, *more, **request):
    """Kill at each record in turn and yield; every start is fresh. Ends after the first run that was not reached."""
    for number in itertools.count(1):
        bench.start()
        outcome = bench.run("on", *more, kill=f"{how}:{number}", **request)
        if outcome.code != KILLED:
            assert number > 15, "the loop must have passed every stage"
            return
        assert_explained(bench)
        yield number
        assert number < 80


@pytest.mark.parametrize("how", ["after", "torn"])
def test_started_again_it_goes_on_to_the_end(bench, how):
    for _ in kill_everywhere(bench, how):
        outcome = bench.run()
        assert outcome.code == 0, outcome.out
        assert_ended(bench, outcome, "on")
        assert bench.pid() == int((bench.folder / "pid").read_text())


def test_rollback_takes_it_back(bench):
    for _ in kill_everywhere(bench, "torn"):
        outcome = bench.rollback()
        assert outcome.code == 0, outcome.out
        assert bench.modes() == ("off", "off")
        assert not bench.owned.exists()
        assert not bench.records() or bench.records()[-1]["stage"] == "rolled-back"


def test_killed_on_the_way_back_from_a_gate_it_still_comes_back(bench):
    for _ in kill_everywhere(bench, "torn", closed="on"):
        outcome = bench.run(closed="on")
        assert outcome.code in (20, 21), outcome.out
        assert_ended(bench, outcome, "on")
        assert not bench.owned.exists()


def test_started_again_with_another_plan_it_rolls_back_first(bench):
    for _ in kill_everywhere(bench, "after"):
        if bench.records()[-1]["event"] != "enter":
            continue
        outcome = bench.run("validate")
        assert outcome.code == 21, outcome.out
        assert_ended(bench, outcome, "on")


def test_the_same_with_restarts_and_an_eager_stage(bench):
    """Killed round each change of files, each restart and after each stage; the gates are the real ones."""
    judge_for_real(bench)
    bench.base = {"KDTREE_VERIFY": "off"}
    bench.start()
    assert bench.run("on", *EAGER, **REAL).code == 0
    acts = [record["seq"] for record in bench.records() if record["data"].get("act") in ("files", "restart")]
    assert len(acts) == 14
    stages = [record["seq"] for record in bench.records() if record["event"] == "passed"]
    assert len(stages) == 8
    for number in sorted(acts + stages):
        bench.start()
        assert bench.run("on", *EAGER, kill=f"after:{number}", **REAL).code == KILLED
        assert_explained(bench)
        if bench.modes()[0] == "ServerUnreachableError":
            bench.boot()  # what a supervisor does
        outcome = bench.run("on", *EAGER, **REAL)
        assert outcome.code in (0, 21), outcome.out
        assert_ended(bench, outcome, "on")
        assert_judged_before_on(bench)


@pytest.mark.parametrize("stage", ["validate", "soak", "on", "unit"])
def test_a_server_that_restarted_meanwhile_in_its_mode_is_not_gone_on_with(bench, stage):
    """Its mode explains itself; that it is another process does not."""
    bench.start()
    entered = {"validate": 8, "soak": 12, "on": 17, "unit": 21}[stage]  # each after the switch of the stage
    assert bench.run(kill=f"after:{entered}").code == KILLED
    assert bench.records()[-1]["stage"] == stage
    mode = bench.base["KDTREE_VERIFY"] = bench.modes()[0]
    bench.boot()
    assert bench.modes()[0] == mode
    outcome = bench.run()
    assert outcome.code == 21, outcome.out
    assert "the server restarted" in outcome.out
    assert bench.records()[-1]["stage"] == "rolled-back"


def test_a_server_that_restarted_meanwhile_is_not_gone_on_with(bench):
    bench.start()
    for number in range(1, 30):
        assert bench.run(kill=f"after:{number}").code == KILLED
        if bench.modes()[0] == "on":
            break
        bench.start()
    bench.boot()
    assert bench.modes() == ("off", "off")
    outcome = bench.run()
    assert outcome.code == 21
    assert "rolled back" in outcome.last
    assert_ended(bench, outcome, "on")
