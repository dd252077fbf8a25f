"""A file that is replaced is the same place: link, mode, owner, attributes; and whole, whatever happens meanwhile."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.cutover.fakes import FakeRunner, FakeService, plan_to_on, tool_of, verdict, with_judge

from treeverify.cutover import files, replacing
from treeverify.cutover.exits import Exit
from treeverify.errors import CutoverError

OLD, NEW = b"old\r\n\xc3\xbc\n", b"new\r\nand no end"
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
ACL = "system.posix_acl_access"


def acl(reader):
    """An access list: rw for the owner, r for one more user and nobody else."""
    none = 0xFFFFFFFF
    entries = [(0x01, 6, none), (0x02, 4, reader), (0x04, 0, none), (0x10, 4, none), (0x20, 0, none)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.fixture(params=["plain", "absolute link", "relative link", "links in a row", "a linked folder"])
def path(request, tmp_path):
    """A name under which the file ``real/file`` is found."""
    (tmp_path / "real").mkdir()
    real = tmp_path / "real/file"
    real.write_bytes(OLD)
    link = tmp_path / "link"
    if request.param == "plain":
        return real
    if request.param == "a linked folder":
        link.symlink_to("real")
        return link / "file"
    link.symlink_to("real/file" if request.param == "relative link" else real)
    if request.param == "links in a row":
        (tmp_path / "second").symlink_to("link")
        return tmp_path / "second"
    return link


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def links(folder):
    return {found: os.readlink(found) for found in folder.rglob("*") if found.is_symlink()}


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o664, 0o400, 0o755])
@pytest.mark.parametrize("mask", [0o077, 0o022, 0o000])
def test_links_and_mode_stay_whatever_the_umask(path, tmp_path, umask, mode, mask):
    path.chmod(mode)
    before = links(tmp_path)
    umask(mask)
    replacing.replace(path, NEW)
    assert path.read_bytes() == NEW
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert links(tmp_path) == before
    assert [found.name for found in (tmp_path / "real").iterdir()] == ["file"]


@AS_ROOT
@pytest.mark.parametrize("owner", [(65534, 65534), (0, 65534), (1234, 0)])
def test_owner_and_group_stay(path, owner):
    os.chown(path, *owner)
    path.chmod(0o6755)  # which a change of the owner takes away
    replacing.replace(path, NEW)
    assert (path.stat().st_uid, path.stat().st_gid) == owner
    assert stat.S_IMODE(path.stat().st_mode) == 0o6755


@pytest.mark.parametrize(("name", "value"), [("user.site", b"kept"), (ACL, acl(65534))])
def test_attributes_stay(path, name, value):
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"{name}: {error.strerror} on this file system")
    replacing.replace(path, NEW)
    assert os.getxattr(path, name) == value


def test_a_new_file_has_what_the_umask_gives(tmp_path, umask):
    for mask in (0o077, 0o022):
        umask(mask)
        replacing.replace(tmp_path / str(mask), NEW)
        assert stat.S_IMODE((tmp_path / str(mask)).stat().st_mode) == 0o666 & ~mask


def test_a_link_to_nothing_gets_its_file_and_loses_it_again(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("there")
    replacing.replace(link, NEW)
    assert (tmp_path / "there").read_bytes() == NEW
    replacing.remove(link)
    assert links(tmp_path) == {link: "there"}
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("name", ["fsync", "fchmod"])
def test_what_fails_leaves_the_old_file_alone(path, tmp_path, monkeypatch, name):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="No space"):
        replacing.replace(path, NEW)
    assert path.read_bytes() == OLD
    assert [found.name for found in (tmp_path / "real").iterdir()] == ["file"]


def test_the_new_content_is_never_open_to_more_than_the_old_was(path, umask, monkeypatch):
    path.chmod(0o600)
    seen, real = [], os.fsync

    def fsync(descriptor):
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode)))
    umask(0)
    replacing.replace(path, NEW)
    assert seen[:2] == [0o600, 0o600]


OWNED = f"{files.MARK}KDTREE_VERIFY=off\r\n# ü, an operator's own line  ".encode()


@pytest.fixture
def linked(tmp_path, monkeypatch):
    """A tool whose owned file exists, as a link to one with mode 644 elsewhere."""
    monkeypatch.setattr("treeverify.cutover.report.write", lambda path, *rest: path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/mode.env").write_bytes(OWNED)
    (tmp_path / "site/mode.env").chmod(0o644)
    (tmp_path / "owned.env").symlink_to("site/mode.env")
    return tool_of(tmp_path, FakeService(), FakeRunner("true", tmp_path / "owned.env", timeout=600))


def as_it_was(tmp_path):
    owned = tmp_path / "owned.env"
    assert os.readlink(owned) == "site/mode.env"
    assert owned.read_bytes() == OWNED
    assert stat.S_IMODE(owned.stat().st_mode) == 0o644


def test_a_rollback_gives_the_same_file_back(linked, tmp_path, umask):
    umask(0o077)
    linked.run(plan_to_on())
    assert b'KDTREE_VERIFY="on"' in (tmp_path / "site/mode.env").read_bytes()
    assert stat.S_IMODE((tmp_path / "site/mode.env").stat().st_mode) == 0o644
    linked.rollback()
    as_it_was(tmp_path)


def test_a_gate_in_the_last_stage_gives_it_back_too(linked, tmp_path, umask):
    umask(0o077)
    with_judge(linked, lambda at, *_: verdict(at, passed=at != "on"))
    with pytest.raises(CutoverError, match="proved"):
        linked.run(plan_to_on())
    as_it_was(tmp_path)


def test_mode_and_owner_that_others_changed_come_back(linked, tmp_path):
    linked.run(plan_to_on())
    real = tmp_path / "site/mode.env"
    real.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(real, 65534, 65534)
    linked.rollback()
    as_it_was(tmp_path)
    assert real.stat().st_uid == os.geteuid()


def test_a_link_that_became_a_file_is_not_proved(linked, tmp_path):
    linked.run(plan_to_on())
    owned = tmp_path / "owned.env"
    content = owned.read_bytes()
    owned.unlink()
    owned.write_bytes(content)
    with pytest.raises(
        CutoverError, match=r"expected .*site/mode\.env of .*mode 644 as before, got .*owned\.env"
    ) as caught:
        linked.rollback()
    assert caught.value.exit_code == Exit.STUCK


def test_a_file_that_was_not_there_is_gone_again_and_its_link_stays(linked, tmp_path):
    (tmp_path / "site/mode.env").unlink()
    linked.run(plan_to_on())
    assert (tmp_path / "site/mode.env").exists()
    linked.rollback()
    assert not (tmp_path / "site/mode.env").exists()
    assert os.readlink(tmp_path / "owned.env") == "site/mode.env"


REFUSES = """
import os, pathlib, sys
from treeverify.cutover import files
from treeverify.errors import CutoverError
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for name in sys.argv[1:]:
    try:
        files.require_replaceable(pathlib.Path(name))
        print("may")
    except CutoverError as error:
        print(int(error.exit_code), error)
"""


@AS_ROOT
def test_who_could_not_keep_the_owner_is_refused_before_anything_is_touched(tmp_path):
    temporary = Path(tempfile.gettempdir())
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to(temporary) and folder != temporary:
            folder.chmod(0o755)
    theirs, mine, locked = (tmp_path / name for name in ("theirs", "mine", "locked/mine"))
    locked.parent.mkdir()
    for path in (theirs, mine, locked):
        path.touch()
        path.chmod(0o666)
    for path in (tmp_path, mine, locked):
        os.chown(path, 65534, 65534)
    said = subprocess.run([sys.executable, "-c", REFUSES, theirs, mine, locked], capture_output=True, text=True)
    first, second, third = said.stdout.splitlines()
    assert first.startswith(f"{int(Exit.NOT_PERMITTED)} {theirs}: cannot be written by user 65534")
    assert second == "may"
    assert third.startswith(f"{int(Exit.NOT_PERMITTED)} ")
    assert "locked cannot be written" in third
