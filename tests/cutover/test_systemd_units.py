"""A stub server as a unit of a real systemd: what it says of a unit, what wins, restarts, and a kill at each stage."""

from __future__ import annotations

import json
import sys

import pytest
from tests.cutover.conftest import HERE, Driver
from tests.cutover.systemd import UnitBench
from tests.cutover.test_quoting import FILES

from treeverify.cutover.quoting import parse_environment_file

pytestmark = [pytest.mark.systemd, pytest.mark.slow]
STUB = f"{sys.executable} {HERE / 'stub_server.py'} {{port}}"


def settings_of(systemd):
    folder = systemd.log.parent
    (folder / "prompts.jsonl").write_text(json.dumps({"input": "def parse(", "forced": "path):\n    return\n"}) + "\n")
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"prompts_file": str(folder / "prompts.jsonl"), "health_seconds": 600}))
    return settings


@pytest.fixture
def stub(systemd, driver_inside, request):
    folder, settings = systemd.log.parent, settings_of(systemd)
    name = "stub-" + request.node.name.partition("[")[0].removeprefix("test_").replace("_", "-")[:40]
    bench = UnitBench(systemd, driver_inside, folder, name, STUB, settings=settings)
    yield bench
    bench.stop()


def test_a_live_switch_and_a_unit_that_keeps_it(stub):
    stub.start()
    pid = stub.process()["SYSTEMD_EXEC_PID"]
    outcome = stub.run("on")
    assert outcome.code == 0, outcome.out
    assert stub.live() == "on"
    assert stub.process()["SYSTEMD_EXEC_PID"] == pid
    assert stub.systemd.run("cat", stub.path).stdout == stub.text
    stub.restart()
    assert stub.live() == "on"
    assert stub.process()["KDTREE_VERIFY"] == "on"
    assert stub.cutover("rollback").code == 0
    assert stub.live() == "off"
    assert stub.owned() == []
    stub.restart()
    assert stub.live() == "off"


def test_a_server_that_cannot_be_switched_is_restarted_where_that_is_allowed(stub):
    stub.environment = {}
    stub.start()
    refused = stub.run("on")
    assert refused.code == 14
    assert "--allow-restart" in refused.last
    assert stub.owned() == []
    outcome = stub.run("on", "--allow-restart")
    assert outcome.code == 0, outcome.out
    assert "restarting" in outcome.out
    assert stub.live() == "on"
    assert stub.process()["KDTREE_VERIFY"] == "off"
    stub.restart()
    assert stub.process()["KDTREE_VERIFY"] == "on"
    assert stub.cutover("rollback").code == 0
    assert "KDTREE_VERIFY" not in stub.process()


def test_a_server_without_the_plugin_gets_it_by_a_variable_and_a_closed_gate_takes_it_away(stub):
    stub.environment = {"STUB_PLUGIN": "0"}
    stub.systemd.write(stub.path, "")
    settings = json.loads(stub.settings.read_text()) | {"variables": {"STUB_PLUGIN": "1"}}
    with_plugin = stub.settings.with_name("with-plugin.json")
    with_plugin.write_text(json.dumps(settings))
    stub.settings = with_plugin
    start_without_plugin(stub)
    outcome = stub.run("on", "--allow-restart", closed="on")
    assert outcome.code == 20, outcome.out
    assert stub.owned() == []
    assert stub.process()["STUB_PLUGIN"] == "0"
    outcome = stub.run("on", "--allow-restart")
    assert outcome.code == 0, outcome.out
    assert stub.process()["STUB_PLUGIN"] == "1"


def start_without_plugin(stub):
    """``start`` waits for a state, which this server does not have."""
    stub.restart = lambda: stub.systemd.run("systemctl", "restart", stub.unit)
    stub.start()
    script = "import socket, sys, time\nfor _ in range(6000):\n    time.sleep(0.1)\n    try:\n"
    script += (
        "        socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n        break\n    except OSError: pass"
    )
    stub.systemd.run(sys.executable, "-c", script, str(stub.port))


WINNERS = {
    "several Environment= lines": 'Environment=KDTREE_VERIFY=on\nEnvironment="A=1" "KDTREE_VERIFY=off"\n',
    "an environment file": "EnvironmentFile={folder}/vendor.env\n",
    "an optional file that is there": "EnvironmentFile=-{folder}/vendor.env\nEnvironmentFile=-/none\n",
    "a pattern": "EnvironmentFile={folder}/vendor*.env\n",
}


@pytest.mark.parametrize("lines", WINNERS.values(), ids=WINNERS)
def test_whatever_sets_the_mode_in_the_unit_the_owned_drop_in_wins(stub, lines):
    (stub.folder / "vendor.env").write_text("# vendor\nKDTREE_VERIFY='of'\"f\" \nKDTREE_VERIFY_ALLOW=off,validate,on\n")
    stub.systemd.write(f"{stub.drop_ins}/90-site.conf", '[Service]\nEnvironment="B=b c" KDTREE_VERIFY=off\n')
    stub.start(lines.format(folder=stub.folder))
    status = json.loads(stub.cutover("status", "--json").out)
    assert (status["live"], status["next_start"]) == ("off", "off")
    outcome = stub.run("validate")
    assert outcome.code == 0, outcome.out
    stub.restart()
    assert stub.live() == "validate"
    assert stub.process()["KDTREE_VERIFY"] == "validate"
    assert stub.cutover("rollback").code == 0
    assert stub.owned() == [f"{stub.drop_ins}/90-site.conf"]
    stub.restart()
    assert stub.live() == "off"


def test_what_would_win_over_the_owned_drop_in_is_refused(stub):
    stub.systemd.write(f"{stub.drop_ins}/zzz.conf", "[Service]\nEnvironment=KDTREE_VERIFY=off\n")
    stub.start()
    outcome = stub.run("on")
    assert outcome.code == 14
    assert "zzz.conf" in outcome.last
    stub.systemd.write(f"{stub.drop_ins}/zzz.conf", "[Service]\nUnsetEnvironment=KDTREE_VERIFY\n")
    stub.systemd.run("systemctl", "daemon-reload")
    outcome = stub.run("on")
    assert outcome.code == 14
    assert "UnsetEnvironment" in outcome.last
    for start in ("/usr/bin/env KDTREE_VERIFY=off true", '/bin/sh -c "true\\nKDTREE_VERIFY_ALLOW=on exec true"'):
        stub.systemd.write(f"{stub.drop_ins}/zzz.conf", f"[Service]\nExecStart=\nExecStart={start}\n")
        stub.systemctl("daemon-reload")
        outcome = stub.run("on")
        assert outcome.code == 14
        assert "ExecStart= sets the mode itself" in outcome.last
    assert stub.live() == "off"


def test_files_that_systemd_has_not_read_yet_are_refused(stub):
    """A reload of ours would bring them to life, and what the next start was taken for would be wrong."""
    stub.start()
    stub.systemd.write(f"{stub.drop_ins}/zzz.conf", "[Service]\nEnvironment=KDTREE_VERIFY=off\n")
    for more in ([], ["--dry-run"]):
        outcome = stub.run("on", *more)
        assert outcome.code == 14, outcome.out
        assert "daemon-reload" in outcome.last
    stub.systemctl("daemon-reload")
    assert "zzz.conf" in stub.run("on").last
    stub.systemd.write(f"{stub.drop_ins}/zzz.conf", "# Environment= is set elsewhere\n[Service]\nNice=1\n")
    stub.systemctl("daemon-reload")
    stub.systemd.run("rm", f"{stub.drop_ins}/zzz.conf")
    outcome = stub.run("on")  # the drop-in says nothing of the environment, and is gone
    assert outcome.code == 14, outcome.out
    assert "daemon-reload" in outcome.last
    stub.systemctl("daemon-reload")
    assert stub.run("on", "--dry-run").code == 0
    assert stub.live() == "off"
    assert not stub.state.exists()


@pytest.mark.parametrize("what", ["run", "rollback"])
def test_killed_between_the_files_and_the_reload(stub, what):
    """The files are as they shall be, and systemd still has the old ones."""
    stub.start()
    assert stub.run("validate").code == 0
    assert stub.cutover("rollback", kill="reload:1").code == -9
    assert stub.owned() == []
    outcome = stub.run("validate") if what == "run" else stub.cutover("rollback")
    assert outcome.code == (21 if what == "run" else 0), outcome.out
    assert "proved" in outcome.last
    status = json.loads(stub.cutover("status", "--json").out)
    assert (status["live"], status["next_start"], status["stage"]) == ("off", "off", "rolled-back")
    stub.restart()
    assert stub.live() == "off"


def test_systemd_reads_environment_files_as_we_do(systemd):
    """One service for each text; it prints what it got."""
    folder = systemd.log.parent
    names = [name for name in FILES if name != "no end"]
    for number, name in enumerate(names):
        (folder / f"odd-{number}.env").write_text(FILES[name][0])
        print_it = f"{sys.executable} -c 'import os; print(repr(os.environ.get(\"KDTREE_VERIFY\")))'"
        out = f"StandardOutput=truncate:{folder}/odd-{number}.out\nEnvironmentFile={folder}/odd-{number}.env\n"
        systemd.write(
            f"/run/systemd/system/odd-{number}.service", f"[Service]\nType=oneshot\nExecStart={print_it}\n{out}"
        )
    systemd.run("systemctl", "daemon-reload")
    systemd.run("systemctl", "start", *[f"odd-{number}.service" for number in range(len(names))])
    for number, name in enumerate(names):
        got = (folder / f"odd-{number}.out").read_text().strip()
        assert got == repr(parse_environment_file(FILES[name][0]).get("KDTREE_VERIFY")), name


def test_a_server_that_dies_of_the_mode_is_brought_back(stub):
    stub.environment["STUB_DEAD"] = "on"
    stub.start()
    outcome = stub.run("on")
    assert outcome.code == 21, outcome.out
    assert "rolled back, proved" in outcome.last
    assert stub.live() == "off"
    assert stub.owned() == []


def test_a_unit_that_does_not_come_up_again_is_brought_back(stub):
    """The restart into the eager stage fails for good: the start limit is hit."""
    stub.start()
    outcome = stub.run("on", "--allow-restart", "--eager", "STUB_DEAD=validate")
    assert outcome.code == 21, outcome.out
    assert "before the server answered" in outcome.out
    assert stub.live() == "off"
    assert stub.owned() == []
    assert "STUB_DEAD" not in stub.process()


def test_the_eager_stage_has_its_variables_and_the_next_one_not(stub):
    stub.start()
    outcome = stub.run("on", "--allow-restart", "--eager", "EAGER=a b$c", closed="nothing", kill="after:19")
    assert outcome.code == -9
    assert stub.process()["EAGER"] == "a b$c"
    outcome = stub.run("on", "--allow-restart", "--eager", "EAGER=a b$c")
    assert outcome.code == 0, outcome.out
    assert stub.live() == "on"
    assert stub.process()["KDTREE_VERIFY"] == "validate"  # what it was started with, before it was let into on
    assert "EAGER" not in stub.process()
    stub.restart()
    assert (stub.live(), stub.process()["KDTREE_VERIFY"]) == ("on", "on")


def test_killed_in_each_stage_the_next_start_ends_it(stub):
    """Stages under systemd; test_kill.py has every record."""
    stub.start()
    assert stub.run("on").code == 0
    entered = [record["seq"] for record in journal(stub) if record["event"] in ("enter", "end")]
    assert len(entered) == 6
    assert stub.cutover("rollback").code == 0
    for number in entered:
        assert stub.run("on", kill=f"after:{number}").code == -9
        assert json.loads(stub.cutover("status", "--json").out)["explained"]
        assert stub.run("on").code == 0
        assert stub.live() == "on"
        assert journal(stub)[-1]["stage"] == "done"
        assert stub.cutover("rollback").code == 0
        assert stub.live() == "off"
        assert stub.owned() == []


def journal(stub):
    return [json.loads(line)["record"] for line in (stub.state / "journal.jsonl").read_text().splitlines()]


def test_a_unit_of_the_users_own_manager(systemd):
    """A manager of root's own beside PID 1, with its own home and runtime folder."""
    home, runtime = systemd.log.parent / "home", "/run/user/0"
    variables = f"HOME={home} XDG_RUNTIME_DIR={runtime}"
    manager = f"[Service]\nType=notify\nDelegate=yes\nEnvironment={variables}\nExecStart=/lib/systemd/systemd --user\n"
    systemd.run("mkdir", "-p", str(home), runtime)
    systemd.write("/run/systemd/system/users.service", manager)
    systemd.run("systemctl", "daemon-reload")
    systemd.run("systemctl", "start", "users.service")
    beside = Driver(systemd.log.parent, (*systemd.prefix, "env", *variables.split()))
    stub = UserBench(systemd, beside, systemd.log.parent, "stub-of-a-user", STUB, settings=settings_of(systemd))
    stub.path = f"{home}/.config/systemd/user/{stub.unit}"
    stub.drop_ins = f"{stub.path}.d"
    stub.start()
    outcome = stub.run("on", "--user")
    assert outcome.code == 0, outcome.out
    assert stub.live() == "on"
    stub.restart()
    assert stub.live() == "on"
    assert len(stub.owned()) == 2
    assert stub.cutover("rollback", "--user").code == 0
    assert (stub.live(), stub.owned()) == ("off", [])
    beside.close()


class UserBench(UnitBench):
    def systemctl(self, *words):
        environment = ["XDG_RUNTIME_DIR=/run/user/0", f"HOME={self.folder}/home"]
        return self.systemd.run("env", *environment, "systemctl", "--user", *words)


def test_a_unit_that_is_not_there(stub):
    outcome = stub.cutover("run", "--to", "on", "--settings", str(stub.settings))
    assert outcome.code == 10
    assert "not-found" in outcome.last
    assert not stub.state.exists()


def test_another_service_at_the_address(stub, systemd, driver_inside):
    stub.start()
    other = UnitBench(systemd, driver_inside, stub.folder, "other", STUB, settings=stub.settings)
    other.start()
    stub.url = other.url
    outcome = stub.run("on")
    assert outcome.code == 19
    assert "not part of the unit" in outcome.last
    assert other.live() == "off"
    assert not stub.state.exists()
    other.stop()


def test_a_user_who_may_not(stub):
    stub.folder.chmod(0o755)
    stub.start()
    outcome = stub.run("on", uid=65534)
    assert outcome.code == 11
    assert "cannot be written by user 65534" in outcome.last
    assert stub.live() == "off"
    assert stub.owned() == []
