"""What can be asked without a systemd: parsing, the environment of a process, owned files."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from treeverify.cutover import files
from treeverify.cutover.exits import Exit
from treeverify.cutover.runner import SystemdRunner
from treeverify.cutover.units import Systemctl, Unit, next_environment, process_environment
from treeverify.errors import CutoverError


def unit(tmp_path, **more):
    given = {"environment": {}, "environment_files": (), "unset": frozenset()} | more
    return Unit(
        name="a.service",
        active="active",
        main_pid=1,
        restarts=0,
        control_group="/a",
        stale=False,
        command="",
        drop_ins=(),
        **given,
    )


def test_the_order_of_what_sets_a_variable(tmp_path):
    (tmp_path / "1.env").write_text("A=first\nB=first\nC=first\nD=first\n")
    (tmp_path / "2.env").write_text("A=second\n")
    named = ((str(tmp_path / "[12].env"), False), (str(tmp_path / "none.env"), True))
    given = unit(
        tmp_path, environment={"A": "line", "E": "line"}, environment_files=named, unset=frozenset({"C", "missing"})
    )
    found = next_environment(given, {"A": "manager", "E": "manager", "F": "manager"})
    assert found == {"A": "second", "B": "first", "D": "first", "E": "line", "F": "manager"}


def test_an_environment_file_that_a_start_would_miss_is_an_error(tmp_path):
    named = ((str(tmp_path / "none.env"), False),)
    with pytest.raises(CutoverError, match=r"none\.env of a\.service does not exist"):
        next_environment(unit(tmp_path, environment_files=named), {})


def test_the_environment_of_a_process_and_of_one_that_overwrote_it(monkeypatch):
    sleep = [sys.executable, "-c", "print(flush=True); input()"]  # an environment is empty for a moment of its start
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(sleep, **pipes, env={"PATH": "/bin", "A": "b=c"}) as child:
        child.stdout.readline()
        assert process_environment(child.pid) == {"PATH": "/bin", "A": "b=c"}
        child.communicate(b"\n")
    with subprocess.Popen(sleep, **pipes, env={}) as child:
        child.stdout.readline()
        assert process_environment(child.pid) == process_environment(os.getpid())
        child.communicate(b"\n")
    with pytest.raises(CutoverError, match="environment of process"):
        process_environment(child.pid)


def test_a_systemctl_that_hangs_is_given_up(tmp_path, monkeypatch):
    program = tmp_path / "systemctl"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(CutoverError, match=r"systemctl daemon-reload: no answer in 0\.2 s"):
        Systemctl(timeout=0.2).call("daemon-reload")


def test_a_machine_without_systemctl_says_what_to_use(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CutoverError, match="--restart-command") as caught:
        Systemctl().show("a.service")
    assert caught.value.exit_code == Exit.NO_UNIT


def test_owned_files_are_put_whole_and_taken_away_with_their_folder(tmp_path):
    path = tmp_path / "a.service.d" / "zz.conf"
    assert files.read(path) is None
    files.put(path, files.MARK + "one")
    files.put(path, files.MARK + "two")
    assert files.read(path) == files.MARK + "two"
    assert [found.name for found in path.parent.iterdir()] == ["zz.conf"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o444
    files.put(path, None)
    assert not path.parent.exists()
    files.put(path, None)
    (tmp_path / "b.service.d").mkdir()
    (tmp_path / "b.service.d" / "other.conf").write_text("")
    files.put(tmp_path / "b.service.d" / "zz.conf", files.MARK)
    files.put(tmp_path / "b.service.d" / "zz.conf", None)
    assert (tmp_path / "b.service.d" / "other.conf").exists()


@pytest.mark.parametrize("content", [b"", b"[Service]\n", b"\xff\xfe"])
def test_a_file_without_the_mark_is_not_ours(tmp_path, content):
    path = tmp_path / "zz.conf"
    path.write_bytes(content)
    with pytest.raises(CutoverError, match="not written by this tool") as caught:
        files.read(path)
    assert caught.value.exit_code == Exit.FOREIGN_FILE


def test_what_a_person_types_is_quoted(monkeypatch):
    """Names of units have backslashes where systemd escaped a character."""
    monkeypatch.setattr(Systemctl, "configuration_folder", lambda self: Path("/etc/systemd/user"))
    unit = r"a\x2db@1.service"
    remove, reload, restart = map(shlex.split, SystemdRunner(unit, user=True).undo_commands())
    assert remove == ["rm", "-f", *(f"/etc/systemd/user/{unit}.d/zz-treeverify.{kind}" for kind in ("conf", "env"))]
    assert reload == ["systemctl", "--user", "daemon-reload"]
    assert restart == ["systemctl", "--user", "restart", unit]


def test_what_a_killed_process_left_beside_an_owned_file_goes_with_it(tmp_path):
    owned = tmp_path / "unit.d" / "owned.env"
    files.put(owned, files.MARK)
    (owned.parent / ".owned.env.new").write_text("half")
    files.put(owned, None)
    assert list(tmp_path.iterdir()) == []
