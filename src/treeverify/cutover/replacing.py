"""Replaces a file at once: whoever reads it finds the old one or the new one, whole, in the same place.

The place is more than the name: what a symbolic link points to, mode, owner and group, access control lists and other
extended attributes all stay as they are. A file that is new gets what the umask and the folder give.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def target(path: Path) -> Path:
    """Return the file that ``path`` is, links followed; it need not exist."""
    return Path(os.path.realpath(path))


def partial(path: Path) -> Path:
    """Return where the new content of ``path`` lies while it is written; a process that is killed may leave it."""
    real = target(path)
    return real.with_name(f".{real.name}.new")


def replace(path: Path, content: bytes) -> None:
    """Make ``content`` the whole of ``path``; it is on the disk, and its name too, when this returns.

    The folder must exist. Raises OSError, and then the old file is there and no part of the new one: also where owner
    or group cannot be given to a new file.
    """
    write_partial(path, content)
    move(path)


def write_partial(path: Path, content: bytes) -> None:
    """Do the first half of ``replace``: all that may fail for want of room or permission."""
    old, written = target(path), partial(path)
    mode = 0o600 if old.exists() else 0o666  # never wider than it was, not even for a moment
    written.unlink(missing_ok=True)  # of a process that was killed
    try:
        with open(written, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if old.exists():
                _make_alike(old, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def move(path: Path) -> None:
    """Do the second half of ``replace``."""
    real = target(path)
    partial(path).replace(real)
    sync_folder(real.parent)


def remove(path: Path) -> None:
    """Remove the file that ``path`` is, a link to it not; no such file is no error. Raises OSError."""
    partial(path).unlink(missing_ok=True)
    real = target(path)
    real.unlink(missing_ok=True)
    sync_folder(real.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in ``folder`` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_alike(old: Path, new: int) -> None:
    """Give the open file ``new`` what ``old`` has beside its content; the order matters: each may change the next."""
    there = os.stat(old)
    mine = os.fstat(new)
    if (there.st_uid, there.st_gid) != (mine.st_uid, mine.st_gid):
        os.fchown(new, there.st_uid, there.st_gid)
    os.fchmod(new, there.st_mode & 0o7777)
    wanted, found = _attributes(old), _attributes(new)
    for name in found.keys() - wanted.keys():  # the folder's default list
        os.removexattr(new, name)
    for name, value in wanted.items():
        if found.get(name) != value:
            os.setxattr(new, name, value)


def _attributes(file: Path | int) -> dict[str, bytes]:
    """Return access control lists, the SELinux label and the user's attributes; what guards the content is left out."""
    try:
        names = os.listxattr(file)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    kept = [name for name in names if name.startswith(("system.", "user.")) or name == "security.selinux"]
    return {name: os.getxattr(file, name) for name in kept}
