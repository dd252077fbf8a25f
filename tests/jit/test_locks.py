"""File systems that cannot lock: a typed error or another kind of lock, never a wait without end."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import trivial

from treeverify.jit import compiler
from treeverify.jit.cache import CacheError

ROOT = Path(__file__).resolve().parents[2]


def number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.fixture
def flock_fails(monkeypatch):
    """flock answers with an error number."""

    def answer(code):
        def flock(descriptor, operation):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "flock", flock)

    return answer


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_lock_that_cannot_be_had_is_a_typed_error(csrc, tmp_path, flock_fails, code):
    flock_fails(code)
    with pytest.raises(
        CacheError, match=rf"the cache {tmp_path}/cache cannot be .*locked.*set TREEVERIFY_CACHE"
    ) as caught:
        compiler.build(trivial.MODULE, trivial.TARGET)
    assert os.strerror(code) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_flock_a_lock_file_will_do(csrc, flock_fails):
    flock_fails(errno.ENOSYS)
    assert compiler.build(trivial.MODULE, trivial.TARGET).is_file()


def test_a_full_disk_is_a_typed_error(csrc, monkeypatch):
    def write(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(CacheError, match="No space left on device"):
        compiler.build(trivial.MODULE, trivial.TARGET)


def test_the_oldest_filelock_that_may_be_installed_is_one_that_does_so():
    """3.16 to 3.20.3 take every answer of flock for "another process has it"; 3.24 is the first to do without flock."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (floor,) = (found.group(1) for name in wanted if (found := re.fullmatch(r"filelock>=(.+)", name)))
    assert (3, 24) <= number(floor) <= number(version("filelock"))
