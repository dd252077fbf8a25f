"""Exit codes of ``treeverify cutover``: a script that calls it can tell the outcomes apart (docs/use/cutover.md)."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """0 is success and 2 a wrong option; 9 to 19 changed nothing; 20 to 29 are back; 30 needs a person."""

    NO_LOGPROBS = 9
    NO_UNIT = 10
    NOT_PERMITTED = 11
    UNREACHABLE = 12
    NO_PLUGIN = 13
    NOT_SWITCHABLE = 14
    OTHER_JOURNAL = 15
    JOURNAL_CORRUPT = 16
    LOCKED = 17
    FOREIGN_FILE = 18
    OTHER_PROCESS = 19
    GATE = 20
    FAILED = 21
    INTERRUPTED = 22
    STUCK = 30
