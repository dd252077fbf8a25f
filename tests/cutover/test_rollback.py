"""A rollback that fails says what is left and what to type; what stops a run need not be an error that we know."""

from __future__ import annotations

import os
import shlex

import pytest
from tests.cutover.fakes import (
    URL,
    FakeRunner,
    FakeService,
    Restarts,
    last,
    plan_to_on,
    sample,
    tool_of,
    verdict,
    with_judge,
)

from treeverify.cutover import files
from treeverify.cutover.acts import Hands
from treeverify.cutover.exits import Exit
from treeverify.cutover.lock import hold_name
from treeverify.cutover.machine import Judges
from treeverify.errors import CutoverError


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def plan():
    return plan_to_on()


@pytest.fixture
def tool(tmp_path, service, monkeypatch):
    monkeypatch.setattr("treeverify.cutover.report.write", lambda path, *rest: path)
    return tool_of(tmp_path, service)


def test_done(tool, plan, service):
    tool.run(plan)
    assert (service.mode, last(tool)) == ("on", "done")
    assert len(tool.status()["verdicts"]) == 3


@pytest.mark.parametrize("stage", ["validate", "soak", "on"])
def test_each_closed_gate_goes_back(tool, plan, service, stage):
    with_judge(tool, lambda at, *_: verdict(at, passed=at != stage))
    with pytest.raises(CutoverError, match="gate closed: test: said so") as caught:
        tool.run(plan)
    assert caught.value.exit_code == Exit.GATE
    assert (service.mode, last(tool)) == ("off", "rolled-back")
    assert tool.status()["explained"]


def test_a_gate_that_judges_nothing_is_closed(tool, plan, service):
    with_judge(tool, lambda *_: [])
    with pytest.raises(CutoverError, match="nothing was judged"):
        tool.run(plan)
    assert service.mode == "off"


def test_an_error_that_nobody_expected_goes_back_too_and_is_not_hidden(tool, plan, service):
    def judge(stage, *_):
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        with_judge(tool, judge).run(plan)
    assert (service.mode, last(tool)) == ("off", "rolled-back")


def test_a_rollback_that_fails_says_what_is_left_and_what_to_type(tool, plan, service):
    def judge(stage, *_):
        service.refuses = {"off"}
        return verdict(stage, passed=stage != "on")

    with pytest.raises(CutoverError) as caught:
        with_judge(tool, judge).run(plan)
    assert caught.value.exit_code == Exit.STUCK
    said = str(caught.value)
    for text in (
        "off: refused",
        "the server has mode on",
        "next start would have KDTREE_VERIFY=off",
        "before it was mode off",
    ):
        assert text in said
    typed = said.partition("Type: treeverify cutover rollback ")[2].partition("; if that fails too: ")
    state, owned = tool.folder, tool.folder.parent / "owned.env"
    options = ["--unit", "fake", "--url", URL, "--state", str(state)]
    options += ["--restart-command", "true # again", "--environment-file", str(owned)]
    assert shlex.split(typed[0]) == options  # whatever told this run from others
    assert typed[2].startswith(f"rm -f {owned} && true # again")
    assert (service.mode, last(tool)) == ("on", "stuck")
    with pytest.raises(CutoverError, match=r"rollback. first") as caught:
        tool.run(plan)
    assert caught.value.exit_code == Exit.STUCK
    service.refuses = set()
    tool.rollback()
    assert (service.mode, last(tool)) == ("off", "rolled-back")


def test_a_server_that_is_gone_at_the_rollback(tool, plan, service):
    def judge(stage, *_):
        service.up = False
        return verdict(stage, passed=False)

    short = plan.model_copy(update={"health_seconds": 0.01})
    with pytest.raises(CutoverError, match="did not answer within") as caught:
        with_judge(tool, judge).run(short)
    assert caught.value.exit_code == Exit.STUCK
    assert "the server's mode is unknown" in str(caught.value)


def test_speed_is_not_judged_in_the_eager_stage(tool, plan, service, tmp_path):
    seen = []

    def judge(stage, baseline, candidate, before, after, limits):
        seen.append((stage, limits.speed_ratio))
        return verdict(stage)

    object.__setattr__(tool, "runner", Restarts(service, tmp_path / "owned.env"))
    with_judge(tool, judge).run(plan.model_copy(update={"may_restart": True, "eager": {"EAGER": "1"}}))
    ratio = plan.limits.speed_ratio
    assert ratio is not None
    checked = ("validate", ratio)
    assert seen == [checked, ("soak", ratio), checked, ("on", None), checked, ("on", ratio)]
    assert (service.mode, service.pid) == ("on", 3)


def test_a_server_that_hangs_at_the_rollback_is_restarted_where_that_is_allowed(tool, plan, service, tmp_path):
    def judge(stage, *_):
        service.refuses = {"off"}
        return verdict(stage, passed=stage != "on")

    object.__setattr__(tool, "runner", Restarts(service, tmp_path / "owned.env"))
    with pytest.raises(CutoverError, match="rolled back, proved") as caught:
        with_judge(tool, judge).run(plan.model_copy(update={"may_restart": True}))
    assert caught.value.exit_code == Exit.GATE
    assert (service.mode, service.pid, last(tool)) == ("off", 2, "rolled-back")


def test_a_journal_that_cannot_be_written_any_more(tool, plan, service, monkeypatch):
    """Nothing may change that the journal does not tell of: the run stops where it is and says so."""
    from treeverify.cutover.journal import Journal

    def judge(stage, *_):
        monkeypatch.setattr(Journal, "append", full)
        return verdict(stage)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with pytest.raises(CutoverError, match="No space left") as caught:
        with_judge(tool, judge).run(plan)
    assert caught.value.exit_code == Exit.STUCK
    assert "the server has mode validate" in str(caught.value)
    assert service.mode == "validate"
    monkeypatch.undo()
    assert tool.status()["explained"]


def test_files_are_taken_away_in_the_reverse_order_also_by_another_process(tool, plan, tmp_path, monkeypatch):
    """A kill between two files must not leave a drop-in that names a file which is not there."""

    class TwoFiles(FakeRunner):
        def contents(self, variables):
            first = super().contents(variables)
            return {**first, tmp_path / "another.conf": files.MARK}

    object.__setattr__(tool, "runner", TwoFiles("true", tmp_path / "owned.env", timeout=5))
    real, order = files.put, []

    def put(path, content):
        order.append((path.name, content is not None))
        real(path, content)

    monkeypatch.setattr(files, "put", put)
    tool.run(plan)
    tool.rollback()
    assert order == [("owned.env", True), ("another.conf", True), ("another.conf", False), ("owned.env", False)]


def test_a_file_that_cannot_be_written_is_named_and_no_part_of_it_is_left(tool, plan, service, tmp_path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if "owned.env" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CutoverError, match=r"proved: .*owned\.env: No space left on device") as caught:
        tool.run(plan)
    assert caught.value.exit_code == Exit.FAILED
    assert (service.mode, last(tool)) == ("off", "rolled-back")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_run_that_cannot_go_on_says_why(tool, plan, service):
    def cut_off():
        def judge(stage, *_):
            raise SystemExit

        object.__setattr__(tool, "judges", Judges(sample, judge))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("treeverify.cutover.machine.roll_back", lambda *_: None)  # as if it were killed
            with pytest.raises(SystemExit):
                tool.run(plan)

    cut_off()
    with pytest.raises(CutoverError, match="cut off in stage validate and cannot go on: other options, settings"):
        tool.run(plan.model_copy(update={"soak_seconds": 1.0}))
    cut_off()
    service.mode = "on"
    with pytest.raises(CutoverError, match="cannot go on: the server has mode on, the run left it in validate"):
        tool.run(plan)
    assert (service.mode, last(tool)) == ("off", "rolled-back")


def test_a_rollback_with_other_files_than_the_run_is_refused(tool, plan, service, tmp_path):
    tool.run(plan)
    object.__setattr__(tool, "runner", FakeRunner("true", tmp_path / "other.env", timeout=5))
    with pytest.raises(CutoverError, match=r"owns .*owned\.env, not .*other\.env") as caught:
        tool.rollback()
    assert caught.value.exit_code == Exit.OTHER_JOURNAL
    assert service.mode == "on"


def test_a_report_that_cannot_be_written_does_not_hide_how_the_run_ended(tool, plan, service, monkeypatch):
    said = []
    object.__setattr__(tool, "say", said.append)
    monkeypatch.setattr("treeverify.cutover.report.write", lambda *_: 1 / 0)
    tool.run(plan)
    assert (service.mode, last(tool)) == ("on", "done")
    assert "no report: ZeroDivisionError: division by zero" in said


def test_a_rollback_after_the_end_goes_back_to_what_was_there(tool, plan, service):
    service.mode = "validate"
    tool.run(plan)
    assert service.mode == "on"
    tool.rollback()
    assert service.mode == "validate"


@pytest.mark.parametrize("stage", ["off", "validate", "soak", "on"])
def test_a_process_that_no_stage_judged_does_not_serve_on(tool, plan, service, stage):
    """The server restarts by itself, in the mode that it had: nothing that was found of the old process counts."""

    def restart():
        service.pid += 1

    def judge(at, *_):
        if at == stage:
            restart()
        return verdict(at)

    with_judge(tool, judge)
    if stage == "off":
        collect = lambda *words: restart() or sample(*words)  # noqa: E731
        object.__setattr__(tool, "judges", Judges(collect, judge))
    served, real = [], service.switch
    service.switch = lambda mode: served.append((mode.value, service.pid)) or real(mode)
    with pytest.raises(CutoverError, match="the server restarted: process 2 serves, the last stage was passed by 1"):
        tool.run(plan)
    assert (service.mode, last(tool)) == ("off", "rolled-back")
    assert ("on", 2) not in served


def test_a_server_that_restarts_while_it_is_switched_is_taken_back(tool, plan, service):
    real = service.switch

    def switch(mode):
        service.pid += mode.value == "on"
        return real(mode)

    service.switch = switch
    with pytest.raises(CutoverError, match="the server restarted"):
        tool.run(plan)
    assert (service.mode, last(tool)) == ("off", "rolled-back")


def test_operators_with_state_folders_of_their_own_are_kept_apart_by_unit(tool, plan, monkeypatch):
    name = f"unit {os.getpid()}"
    monkeypatch.setattr(type(tool.runner), "names", lambda self: (name,))
    with hold_name(name), pytest.raises(CutoverError, match=f"another cutover of {name}") as caught:
        tool.run(plan)
    assert caught.value.exit_code == Exit.LOCKED
    tool.run(plan)


def test_hands_check_nothing_by_default(tool):
    assert Hands(tool.runner, tool.service, None, print).check() is None
