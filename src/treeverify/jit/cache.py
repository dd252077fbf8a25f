"""The folders of compiled files: each is filled by one process, whole or not at all, and checked before it is used.

A folder is filled under a file lock. Its mark, which holds a checksum of its files, is written last; a folder without a
fitting mark (cut off, zero-filled by a power cut, copied by halves) is emptied and filled again. So any number of
processes may start at once; one compiles, the others wait.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from treeverify.env import cache_dir
from treeverify.errors import BuildError

MARK = "complete"


class CacheError(BuildError):
    """The cache itself cannot be used, whichever compiler there is."""


def digest(parts: Iterable[str]) -> str:
    """Return 16 hex digits over all parts, in order."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode() + b"\0")
    return state.hexdigest()[:16]


def folder_of(kind: str, name: str) -> Path:
    """Return the cache's folder ``kind/name``; it may not exist yet. Raises ``ConfigError`` as ``env.cache_dir``."""
    return cache_dir() / kind / name


def complete(folder: Path, product: str, fill: Callable[[], None]) -> Path:
    """Return ``folder/product``, made by ``fill`` under a lock unless the folder's mark says that it is whole.

    Raises ``CacheError`` if the cache cannot be written or locked, and what ``fill`` raises.
    """
    if not _is_whole(folder):
        with _refused_by_the_cache(), _locked(folder.name):
            if not _is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                fill()
                partial = folder / f"{MARK}.partial"
                partial.write_text(_checksum(folder))
                partial.rename(folder / MARK)
    return folder / product


def stamp(folder: Path) -> int | None:
    """Say which filling of the folder this is, for ``discard``; None if it is not whole."""
    try:
        return (folder / MARK).stat().st_mtime_ns
    except OSError:
        return None


def discard(folder: Path, seen: int | None) -> bool:
    """Have the folder filled again at its next use, unless that was done since ``stamp`` gave ``seen``; was it?

    Raises ``CacheError`` if the cache cannot be written or locked.
    """
    with _refused_by_the_cache(), _locked(folder.name):
        ours = stamp(folder) == seen
        if ours:
            (folder / MARK).unlink(missing_ok=True)
        return ours


def say(text: str) -> None:
    """Progress, on stderr, at once."""
    print(f"treeverify: {text}", file=sys.stderr, flush=True)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock of one cache folder; says so on stderr if another process has it."""
    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{name}.lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        say(f"waiting for another process that builds {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _refused_by_the_cache() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"the cache {cache_dir()} cannot be written or locked ({error})"
        raise CacheError(f"{where}; set TREEVERIFY_CACHE to another folder") from error


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / MARK).read_text() == _checksum(folder)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(folder: Path) -> str:
    """Return a hash of the names and bytes of the folder's files, the mark left out."""
    state = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(MARK):
            state.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            state.update(path.read_bytes())
    return state.hexdigest()
