"""One operator at a time: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from treeverify.cutover.exits import Exit
from treeverify.errors import CutoverError


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` meanwhile; its content says who does.

    Raises CutoverError: ``Exit.LOCKED`` with the holder's description, ``Exit.NOT_PERMITTED`` where the file cannot
    be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CutoverError(Exit.NOT_PERMITTED, f"lock {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace").strip() or "an unnamed process"
            raise CutoverError(Exit.LOCKED, f"another cutover of this unit is at work: {owner}") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{_owner()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _owner() -> str:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return f"user {os.getuid()} on {socket.gethostname()}, process {os.getpid()}, since {since}"
