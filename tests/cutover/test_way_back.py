"""The way back: the switch at once, then the files, and only then is the server's health waited for."""

from __future__ import annotations

import pytest
from tests.cutover.fakes import URL, FakeService, Restarts, last, plan_to_on, tool_of, verdict, with_judge

from treeverify.control import http
from treeverify.cutover.exits import Exit
from treeverify.cutover.lock import hold_name
from treeverify.errors import AccessError, CutoverError, ServerError, ServerUnreachableError


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("treeverify.cutover.report.write", lambda path, *rest: path)


class Ill(FakeService):
    """Its health call fails once it has served ``sick``; every call is noted."""

    def __init__(self, sick):
        super().__init__()
        self.sick, self.well, self.calls = sick, True, []

    def switch(self, mode):
        self.calls.append(f"switch {mode.value}")
        self.well &= mode.value != self.sick
        return super().switch(mode)

    def require_healthy(self):
        self.calls.append("health")
        super().require_healthy()
        if not self.well:
            raise ServerError("http://fake/health: expected status 200, got 503: ")


@pytest.mark.parametrize("sick", ["validate", "on"])
def test_the_switch_back_does_not_wait_for_the_servers_health(tmp_path, sick):
    service = Ill(sick)
    tool = tool_of(tmp_path, service)
    with_judge(tool, lambda at, *_: verdict(at, passed=at != sick))
    with pytest.raises(CutoverError, match=r"did not answer within .*the server has mode off") as caught:
        tool.run(plan_to_on(health_seconds=0.01))
    assert caught.value.exit_code == Exit.STUCK
    assert service.mode == "off"
    assert not (tmp_path / "owned.env").exists()
    back = service.calls[service.calls.index(f"switch {sick}") + 1 :]
    assert back[:2] == ["switch off", "health"]
    service.well = True
    tool.rollback()
    assert last(tool) == "rolled-back"


def test_a_finished_run_comes_back_with_its_files_though_the_server_is_not_healthy(tmp_path):
    service = Ill("never")
    tool = tool_of(tmp_path, service)
    tool.run(plan_to_on(health_seconds=0.01))
    assert (tmp_path / "owned.env").exists()
    service.well = False
    with pytest.raises(CutoverError, match="did not answer within"):
        tool.rollback()
    assert service.mode == "off"
    assert not (tmp_path / "owned.env").exists()


def test_a_server_that_is_not_healthy_after_the_switch_is_restarted_where_that_is_allowed(tmp_path):
    service = Ill("on")

    class Heals(Restarts):
        def restart(self):
            super().restart()
            self.service.well = True

    tool = tool_of(tmp_path, service, Heals(service, tmp_path / "owned.env"))
    with_judge(tool, lambda at, *_: verdict(at, passed=at != "on"))
    with pytest.raises(CutoverError, match="rolled back, proved"):
        tool.run(plan_to_on(may_restart=True, health_seconds=0.01))
    assert (service.mode, service.pid) == ("off", 2)


def test_a_server_that_starts_by_itself_at_the_rollback_is_waited_for(tmp_path):
    service = FakeService()
    tool = tool_of(tmp_path, service)
    real, left = service.read, []

    def read():
        if left:
            left.pop()
            raise ServerUnreachableError("http://fake/server_info: connection refused")
        return real()

    def judge(stage, *_):
        left.extend("ab")  # the switch asks in vain, and so does the first look
        return verdict(stage, passed=False)

    service.read = read
    with pytest.raises(CutoverError, match="rolled back, proved"):
        with_judge(tool, judge).run(plan_to_on())
    assert (service.mode, last(tool), left) == ("off", "rolled-back", [])


def test_a_server_that_is_not_healthy_is_not_begun_with(tmp_path):
    service = Ill("never")
    tool = tool_of(tmp_path, service)
    service.well = False
    for act in (tool.run, tool.plan_lines):
        with pytest.raises(CutoverError, match="/health: expected status 200, got 503") as caught:
            act(plan_to_on())
        assert caught.value.exit_code == Exit.UNREACHABLE
    assert not tool.folder.exists()


def test_a_key_that_is_refused_after_a_restart_is_not_waited_for(tmp_path):
    """The start that the unit has now may want another key than the process that served."""

    class OtherKey(Restarts):
        def restart(self):
            super().restart()

            def read():
                raise AccessError("http://fake/server_info: status 401")

            self.service.read = read

    service = FakeService()
    tool = tool_of(tmp_path, service, OtherKey(service, tmp_path / "owned.env"))
    with pytest.raises(CutoverError, match="status 401") as caught:
        tool.run(plan_to_on(may_restart=True, eager={"EAGER": "1"}))
    assert caught.value.exit_code == Exit.STUCK
    assert not (tmp_path / "owned.env").exists()


def test_a_plan_is_not_made_while_another_cutover_is_at_work(tmp_path):
    """Trying the switch could undo that one's."""
    tool, port = tool_of(tmp_path, FakeService()), http.port(URL)
    with hold_name(f"port {port}"), pytest.raises(CutoverError, match="at work") as caught:
        tool.plan_lines(plan_to_on())
    assert caught.value.exit_code == Exit.LOCKED


def test_ranks_in_two_modes_are_brought_back(tmp_path):
    """As a switch leaves them that not every rank took."""
    service = FakeService()

    def judge(stage, *_):
        real = service.read

        def read():
            one, other = real()[0], real()[0]
            if service.mode == "off":
                return [one]
            ranks = [other.ranks[0].model_copy(update={"mode": "off"})]
            return [one, other.model_copy(update={"ranks": ranks})]

        service.read = read
        return verdict(stage, passed=False)

    with pytest.raises(CutoverError, match="rolled back, proved"):
        with_judge(tool_of(tmp_path, service), judge).run(plan_to_on())
    assert service.mode == "off"
