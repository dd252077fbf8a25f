"""One operator at a time."""

from __future__ import annotations

import os
import sys
from subprocess import PIPE, Popen

import pytest

from treeverify.cutover.exits import Exit
from treeverify.cutover.lock import hold, hold_name
from treeverify.cutover.runner import SystemdRunner
from treeverify.errors import CutoverError

HOLD_NAME = """
import sys
from treeverify.cutover.lock import hold_name
with hold_name(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
HOLD = """
import pathlib, sys
from treeverify.cutover.lock import hold
with hold(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_told_who_the_first_is_and_a_kill_ends_the_lock(tmp_path):
    path = tmp_path / "lock"
    first = Popen([sys.executable, "-c", HOLD, str(path)], stdin=PIPE, stdout=PIPE)
    try:
        assert first.stdout.readline() == b"held\n"
        with (
            pytest.raises(CutoverError, match=f"user {os.getuid()} on .*, process {first.pid}, since") as caught,
            hold(path),
        ):
            pass
        assert caught.value.exit_code == Exit.LOCKED
    finally:
        first.kill()
        first.wait()
    with hold(path):
        assert f"process {os.getpid()}" in path.read_text()


def test_it_can_be_taken_again_after_an_error_inside(tmp_path):
    with pytest.raises(ValueError, match="inside"), hold(tmp_path / "lock"):
        raise ValueError("inside")
    with hold(tmp_path / "lock"):
        pass


def test_a_folder_that_is_not_there_is_not_permitted(tmp_path):
    with pytest.raises(CutoverError, match="lock") as caught, hold(tmp_path / "none" / "lock"):
        pass
    assert caught.value.exit_code == Exit.NOT_PERMITTED


def test_a_name_is_held_on_the_whole_machine_and_a_kill_ends_it():
    name = f"test {os.getpid()} {'x' * 200}"
    first = Popen([sys.executable, "-c", HOLD_NAME, name], stdin=PIPE, stdout=PIPE)
    try:
        assert first.stdout.readline() == b"held\n"
        held = f"another cutover of {name} is at work: user {os.getuid()}, process {first.pid}$"
        with pytest.raises(CutoverError, match=held) as caught, hold_name(name):
            pass
        assert caught.value.exit_code == Exit.LOCKED
        with hold_name(f"{name}, another"):
            pass
    finally:
        first.kill()
        first.wait()
    with hold_name(name), pytest.raises(CutoverError, match=f"process {os.getpid()}$"), hold_name(name):
        pass


def test_a_process_that_is_started_meanwhile_does_not_keep_the_name():
    """As the restart command's server would."""
    name = f"test {os.getpid()} started"
    with hold_name(name):
        started = Popen(["sleep", "60"])
    try:
        with hold_name(name):
            pass
    finally:
        started.kill()
        started.wait()


def test_a_unit_of_the_user_is_another_than_the_systems():
    names = [SystemdRunner("a.service", user=user).names() for user in (False, True)]
    assert names == [("unit a.service",), (f"user {os.getuid()}'s unit a.service",)]


def test_operators_with_state_folders_of_their_own_are_kept_apart_by_port(bench):
    """However they call unit and host: a restart command is known by the port of the server."""
    bench.boot()
    first = Popen([sys.executable, "-c", HOLD_NAME, f"port {bench.port}"], stdin=PIPE, stdout=PIPE)
    try:
        assert first.stdout.readline() == b"held\n"
        for host in ("127.0.0.1", "localhost"):
            bench.url, bench.state = f"http://{host}:{bench.port}", bench.folder / f"state-{host}"
            for outcome in (bench.run(), bench.rollback()):
                assert outcome.code == 17, outcome.out
                assert f"process {first.pid}" in outcome.last
            assert bench.modes() == ("off", "off")
    finally:
        first.kill()
        first.wait()
    assert bench.run().code == 0
