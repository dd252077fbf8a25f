"""The files that a cutover owns: written whole or not at all, never a vendor's or an operator's."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from treeverify.cutover import replacing
from treeverify.cutover.exits import Exit
from treeverify.errors import CutoverError

MARK = "# Written by treeverify cutover, and changed or removed by it. Put nothing else here.\n"


class Place(BaseModel):
    """What a file is beside its content; all but ``target`` is None where there is no file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    """The file itself, links followed."""
    mode: int | None = None
    owner: int | None = None
    group: int | None = None


def place(path: Path) -> Place:
    """Return what ``path`` is now. Raises CutoverError (``Exit.NOT_PERMITTED``)."""
    real = replacing.target(path)
    try:
        found = real.stat()
    except FileNotFoundError:
        return Place(target=str(real))
    except OSError as error:
        raise CutoverError(Exit.NOT_PERMITTED, f"{path}: {error.strerror}") from None
    return Place(target=str(real), mode=found.st_mode & 0o7777, owner=found.st_uid, group=found.st_gid)


def read(path: Path) -> str | None:
    """Return the content of an owned file, each line end as it is, None if there is none.

    Raises CutoverError: ``Exit.FOREIGN_FILE`` for a file without the mark, ``Exit.NOT_PERMITTED``.
    """
    try:
        content = path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        content = ""
    except OSError as error:
        raise CutoverError(Exit.NOT_PERMITTED, f"{path}: {error.strerror}") from None
    if not content.startswith(MARK):
        raise CutoverError(Exit.FOREIGN_FILE, f"{path}: exists and was not written by this tool; move it away first")
    return content


def require_writable(path: Path) -> None:
    """Raise CutoverError (``Exit.NOT_PERMITTED``) unless ``path`` could be written, its folders made if missing."""
    nearest = path
    while not os.path.exists(nearest):  # unlike Path.exists, False where a folder may not be searched
        nearest = nearest.parent
    if nearest.is_dir() is (nearest == path):
        kind = "is a folder" if nearest == path else f"{nearest} is not a folder"
        raise CutoverError(Exit.NOT_PERMITTED, f"{path}: {kind}")
    if not os.access(nearest, os.W_OK if nearest.is_file() else os.W_OK | os.X_OK):
        raise CutoverError(Exit.NOT_PERMITTED, f"{path}: {nearest} cannot be written by user {os.geteuid()}")


def require_replaceable(path: Path) -> None:
    """Raise CutoverError (``Exit.NOT_PERMITTED``) unless ``path`` could be replaced, its owner and group kept."""
    require_writable(path)
    real, now = replacing.target(path), place(path)
    require_writable(replacing.partial(path))
    user, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
    if user and now.owner is not None and (now.owner != user or now.group not in groups):
        raise CutoverError(
            Exit.NOT_PERMITTED,
            f"{real}: cannot be written by user {user}: a new file would not stay user {now.owner}'s",
        )


def put(path: Path, content: str | None) -> None:
    """Make ``content`` the whole of ``path``, on the disk when this returns; None: no such file, nor an empty folder
    ``*.d`` that held it. Links, modes and owners stay (``replacing``). Raises CutoverError (``Exit.FAILED``) that names
    the file, and then no part of it is left."""
    try:
        if content is not None:
            replacing.target(path).parent.mkdir(parents=True, exist_ok=True)
            replacing.replace(path, content.encode())
        elif replacing.target(path).parent.is_dir():
            replacing.remove(path)
            folder = path.parent
            if folder.suffix == ".d" and not folder.is_symlink() and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise CutoverError(Exit.FAILED, f"{path}: {error.strerror}") from error


def settle(path: Path, was: Place) -> None:
    """Give ``path`` the owner and mode that it had, whoever changed them. Raises CutoverError (``Exit.FAILED``)."""
    now = place(path)
    try:
        if was.mode is not None and was.owner is not None and was.group is not None and now.mode is not None:
            if (now.owner, now.group) != (was.owner, was.group):
                os.chown(path, was.owner, was.group)
            os.chmod(path, was.mode)
    except OSError as error:
        raise CutoverError(Exit.FAILED, f"{path}: {error.strerror}") from error
