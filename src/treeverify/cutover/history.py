"""What a journal says: the last run, how far it came, and in which modes it can have left server and unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from treeverify.cutover.exits import Exit
from treeverify.cutover.journal import Record
from treeverify.cutover.plan import Before, CutoverPlan
from treeverify.cutover.stages import ENDED, Stage
from treeverify.errors import CutoverError

ABSENT = "absent"
"""In place of a mode: a server without the plugin."""


@dataclass
class Run:
    """One cutover, from its records."""

    name: str
    plan: CutoverPlan
    before: Before
    stage: Stage = Stage.OFF
    live: set[str] = field(default_factory=set)
    """Modes that the server may have: the last one told, and one that was about to be."""
    next_start: set[str] = field(default_factory=set)
    """The same of the unit; what a server has that restarted by itself."""
    restarted: bool = False
    """Whether a restart was begun."""
    restart_done: bool = False
    """Whether one was proved."""
    judged: tuple[int, ...] = ()
    """Processes that served when the last stage was passed; empty: none was."""
    touched: bool = False
    """Whether anything was begun that changes server or unit."""
    events: list[Record] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether no tool is, or should be, at work."""
        return self.stage in ENDED

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """Every verdict of every gate, in order."""
        return [record.data["verdict"] for record in self.events if record.event == "verdict"]

    @property
    def reason(self) -> str:
        """Why it was stopped; empty: it was not."""
        return next((str(record.data["reason"]) for record in reversed(self.events) if record.event == "stop"), "")

    def take(self, record: Record) -> None:
        """Follow one record."""
        self.events.append(record)
        self.stage = Stage(record.stage)
        if record.event == "passed":
            self.judged = tuple(record.data["pids"])
        if record.event not in ("intend", "did"):
            return
        begun, act = record.event == "intend", record.data["act"]
        self.touched = True
        self.restarted |= act == "restart"
        self.restart_done |= act == "restart" and not begun
        known = self.next_start if act == "files" else self.live
        if not begun:
            known.clear()
        known.add(record.data["mode"])


def last_run(records: Iterable[Record]) -> Run | None:
    """Return the last run of a unit's journal, None if there is none. Raises as ``units``."""
    run: Run | None = None
    for record in records:
        with _of_this_version(record):
            if record.event == "begin":
                before = Before.model_validate(record.data["before"])
                plan = CutoverPlan.model_validate(record.data["plan"])
                run = Run(record.run, plan, before, live={before.mode or ABSENT}, next_start={before.next_mode})
            if run is not None:
                run.take(record)
    return run


def units(records: Iterable[Record]) -> set[str]:
    """Return the units whose cutovers the records tell of.

    Raises CutoverError (``Exit.JOURNAL_CORRUPT``) that names the first line which says what this version cannot read.
    """
    found = set()
    for record in records:
        with _of_this_version(record):
            if record.event == "begin":
                found.add(record.data["plan"]["unit"])
    return found


@contextmanager
def _of_this_version(record: Record) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError):
        raise CutoverError(
            Exit.JOURNAL_CORRUPT,
            f"the journal's line {record.seq} is whole, but not of this version of treeverify; nothing was changed. "
            "End its run with the version that began it, or look at the service by hand and move the file away",
        ) from None
