"""One operator at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from treeverify.cutover.exits import Exit
from treeverify.cutover.lock import hold
from treeverify.errors import CutoverError

HOLD = """
import pathlib, sys
from treeverify.cutover.lock import hold
with hold(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_told_who_the_first_is_and_a_kill_ends_the_lock(tmp_path):
    path = tmp_path / "lock"
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
