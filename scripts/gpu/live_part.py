"""A part of a live run: where it works, how long it may take, and its record, which is on disk after every step."""

from __future__ import annotations

import io
import json
import signal
import sys
import tarfile
import tempfile
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG_BYTES = 60_000
"""Kept of the end of each log."""
UNFINISHED = "did not finish"


@dataclass
class Part:
    """``folder`` is for logs and traces, ``models`` has the random checkpoints; ``seconds`` is what may be spent."""

    name: str
    record: Path
    folder: Path
    models: Path = Path()
    kinds: tuple[str, ...] = ("graph",)
    startup: float = 120
    seconds: float = 600
    found: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        """Seconds since the part began."""
        return time.monotonic() - self.begin

    def left(self) -> float:
        """Seconds until the part should be done."""
        return self.seconds - self.spent()

    def keep(self, name: str, value: Any) -> None:
        """Put ``value`` into the record under ``name`` and write the record."""
        self.found[name] = value
        self.write()

    def write(self) -> None:
        """Write the record as it stands; a reader never sees half of one."""
        known = {"part": self.name, "failures": self.failures, "seconds": self.spent(), "found": self.found}
        fresh = self.record.with_suffix(".part")
        fresh.write_text(json.dumps(known, indent=1) + "\n")
        fresh.replace(self.record)


def run(part: Part, work: Callable[[Part], None]) -> bool:
    """Run a part; its record and the ends of its logs are left whatever happens, a signal included. True if it failed.

    The record stands beside ``logs_NAME.tar.gz``.
    """
    signal.signal(signal.SIGTERM, _stop)
    print(f"== {part.name}", flush=True)
    part.failures.append(UNFINISHED)
    try:
        work(part)
        part.failures.remove(UNFINISHED)
    except (OSError, RuntimeError, ValueError, KeyError, urllib.error.URLError) as error:
        part.failures.append(f"{type(error).__name__}: {error}")
    finally:
        part.write()
        logs(part.folder, part.record.parent / f"logs_{part.name}.tar.gz")
        told = {"part": part.name, "failures": part.failures, "seconds": round(part.spent(), 1)}
        print(json.dumps(told)[:4000], flush=True)
    return bool(part.failures)


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the writing of the record
    sys.exit("stopped from outside")


def logs(folder: Path, archive: Path) -> None:
    """Pack the ends of the logs in ``folder``; traces and dumps, which are large, stay behind."""
    with tarfile.open(archive, "w:gz") as packed:
        for log in sorted(folder.glob("*.log")):
            text = log.read_bytes()[-LOG_BYTES:]
            entry = tarfile.TarInfo(log.name)
            entry.size = len(text)
            packed.addfile(entry, io.BytesIO(text))


def new_folder() -> Path:
    """A folder for logs and traces that outlives the part."""
    return Path(tempfile.mkdtemp(prefix="live-"))
