"""The append-only journal of a unit's cutovers: one JSON object a line, each on the disk before the next act.

Every line carries its number and a checksum of its exact bytes and of the line before it, so that a line that was
changed in any byte, lost or moved is found. A process that is killed while it writes leaves a last line without its
end: that record never counted, because nothing is done before its record is complete, and it is cut off at the next
append.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from treeverify.cutover.exits import Exit
from treeverify.cutover.replacing import sync_folder
from treeverify.errors import CutoverError


@dataclass(frozen=True)
class Record:
    """One line. ``stage`` is the stage in which it was written; ``data`` depends on ``event``."""

    seq: int
    at: str
    run: str
    event: str
    stage: str
    data: Mapping[str, Any]


_BEGIN, _MIDDLE, _END = b'{"sum": "', b'", "record": ', b"}"
"""Of a line: between them the checksum, and the record's JSON, of which the checksum is."""
_SUM = 16
_EARLIER = b'{"record": '
"""How lines once began, whose checksum did not cover white space."""


def _checksum(previous: str, body: bytes) -> str:
    return hashlib.sha256(previous.encode() + b"\n" + body).hexdigest()[:_SUM]


def _encode(record: Record, previous: str) -> tuple[str, str]:
    """Return the line without its end, and its checksum."""
    body = json.dumps(dict(vars(record)), sort_keys=True).encode()
    checksum = _checksum(previous, body)
    return (_BEGIN + checksum.encode() + _MIDDLE + body + _END).decode(), checksum


def _decode(line: bytes, seq: int, previous: str) -> tuple[Record, str]:
    """Return the record and its checksum; raises what the journal catches for a line that is not whole."""
    head = len(_BEGIN) + _SUM + len(_MIDDLE)
    body = line[head : -len(_END)]
    checksum = _checksum(previous, body)
    if line != _BEGIN + checksum.encode() + _MIDDLE + body + _END:
        raise ValueError("checksum")
    record = Record(**json.loads(body))
    if record.seq != seq:
        raise ValueError("number")
    return record, checksum


class Journal:
    """The journal at ``path``, which need not exist yet. One writer at a time: the holder of the unit's lock."""

    def __init__(self, path: Path) -> None:
        """Read ``path``; raises CutoverError (``Exit.JOURNAL_CORRUPT``) that names the first line that is not whole."""
        self.path = path
        self.records: list[Record] = []
        self.torn = False
        """Whether the last line has no end."""
        self._sum = ""
        self._whole = 0
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise CutoverError(Exit.NOT_PERMITTED, f"journal {path}: {error.strerror}") from None
        *lines, tail = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                record, self._sum = _decode(line, number, self._sum)
            except (ValueError, TypeError, RecursionError):
                raise self._refusal(number, line) from None
            self.records.append(record)
        if self._is_whole(tail[:-1]) and tail[-1:] != b"\0":  # not torn: only its end was changed
            raise self._refusal(len(lines) + 1, tail)
        self.torn = bool(tail)
        self._whole = len(content) - len(tail)

    def _is_whole(self, line: bytes) -> bool:
        try:
            _decode(line, len(self.records) + 1, self._sum)
        except (ValueError, TypeError, RecursionError):
            return False
        return True

    def _refusal(self, number: int, line: bytes) -> CutoverError:
        said, end = "is not as it was written", "Look at the service by hand, then move the file away"
        if line.startswith(_EARLIER):
            said, end = "was written by an earlier treeverify", "Roll its run back with that one, or " + end.lower()
        return CutoverError(
            Exit.JOURNAL_CORRUPT, f"journal {self.path}: line {number} {said}; nothing was changed. {end}"
        )

    def append(self, run: str, event: str, stage: str, **data: object) -> Record:
        """Write one record; it is on the disk when this returns. Raises OSError, and then the record does not count."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = Record(len(self.records) + 1, at, run, event, stage, data)
        line, checksum = _encode(record, self._sum)
        new = not self.path.exists()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, self._whole)  # a torn line, of an earlier process or of a full disk
            os.lseek(descriptor, self._whole, os.SEEK_SET)
            _write_all(descriptor, f"{line}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            sync_folder(self.path.parent)
        self._sum, self.torn = checksum, False
        self._whole += len(line.encode()) + 1
        self.records.append(record)
        return record


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
