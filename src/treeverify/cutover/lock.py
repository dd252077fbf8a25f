"""One operator at a time: locks that end with the process that holds them, however that ends."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import struct
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


@contextmanager
def hold_name(name: str) -> Iterator[None]:
    """Hold ``name`` on this machine meanwhile, whoever asks: a socket of that name in Linux's abstract namespace.

    Unlike a file it needs no folder that all users may write, is never left behind, and the kernel says who holds it.
    Containers with a network of their own have names of their own. Raises CutoverError (``Exit.LOCKED``).
    """
    address = f"\0treeverify-cutover/{hashlib.sha256(name.encode()).hexdigest()}"
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise CutoverError(Exit.FAILED, f"lock {name}: {error.strerror}") from None
            raise CutoverError(Exit.LOCKED, f"another cutover of {name} is at work: {_holder(address)}") from None
        held.listen()
        yield


def _holder(address: str) -> str:
    with socket.socket(socket.AF_UNIX) as asked:
        try:
            asked.connect(address)
        except OSError:
            return "a process that began or ended just now"
        pid, uid, _ = struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return f"user {uid}, process {pid}"


def _owner() -> str:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return f"user {os.getuid()} on {socket.gethostname()}, process {os.getpid()}, since {since}"
