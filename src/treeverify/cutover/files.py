"""The files that a cutover owns: written whole or not at all, never a vendor's or an operator's."""

from __future__ import annotations

import os
from pathlib import Path

from treeverify.cutover.exits import Exit
from treeverify.cutover.journal import sync_folder
from treeverify.errors import CutoverError

MARK = "# Written by treeverify cutover, and changed or removed by it. Put nothing else here.\n"


def read(path: Path) -> str | None:
    """Return the content of an owned file, None if there is none.

    Raises CutoverError: ``Exit.FOREIGN_FILE`` for a file without the mark, ``Exit.NOT_PERMITTED``.
    """
    try:
        content = path.read_text(encoding="utf-8")
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


def put(path: Path, content: str | None) -> None:
    """Make ``content`` the whole of ``path``, on the disk when this returns; None: no such file, nor an empty folder
    ``*.d`` that held it. Raises CutoverError (``Exit.FAILED``) that names the file, and then no part of it is left."""
    written = path.with_name(f".{path.name}.new")
    try:
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, written, content)
        elif path.parent.is_dir():
            path.unlink(missing_ok=True)
            written.unlink(missing_ok=True)  # of a process that was killed
        else:
            return
        sync_folder(path.parent)
        if content is None and path.parent.suffix == ".d" and not any(path.parent.iterdir()):
            path.parent.rmdir()
    except OSError as error:
        raise CutoverError(Exit.FAILED, f"{path}: {error.strerror}") from error


def _replace(path: Path, written: Path, content: str) -> None:
    try:
        with written.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
