"""Every change that a cutover makes: told to the journal before and after, and proved before it counts as done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treeverify.control.schema import PluginState
from treeverify.cutover import files
from treeverify.cutover.exits import Exit
from treeverify.cutover.history import ABSENT, Run
from treeverify.cutover.journal import Journal
from treeverify.cutover.plan import MODE
from treeverify.cutover.runner import Runner, Status
from treeverify.cutover.service import Service, mode_of, ranks
from treeverify.cutover.stages import Stage
from treeverify.env import VerifyMode
from treeverify.errors import AccessError, CutoverError, PluginMissingError, ServerError

_POLL, _TELL = 0.5, 10.0
_DOWN_POLLS, _RESTARTS = 6, 3
"""A unit is given up that is down in so many polls on end (any restart has a few), or restarted so often."""


@dataclass
class Hands:
    """What a cutover works with."""

    runner: Runner
    service: Service
    journal: Journal
    say: Callable[[str], None]
    check: Callable[[], None] = field(default=lambda: None)
    """Raises CutoverError once the operator has asked to stop."""


class _Watch:
    """Notices that a unit does not come up any more."""

    def __init__(self, unit: str) -> None:
        self._unit, self._down, self._least = unit, 0, -1

    def look(self, status: Status) -> None:
        """Take one more status; raises CutoverError (``Exit.FAILED``) once there is no hope."""
        self._down = self._down + 1 if status.active in ("failed", "inactive") else 0
        self._least = status.restarts if self._least < 0 else min(self._least, status.restarts)
        if self._down >= _DOWN_POLLS or status.restarts - self._least >= _RESTARTS:
            again = f", restarted {status.restarts - self._least} times by itself"
            raise CutoverError(Exit.FAILED, f"{self._unit}: {status.active}{again} before the server answered")


class Acts:
    """Changes on behalf of ``run``; each follows ``run`` along as the journal does."""

    def __init__(self, hands: Hands, run: Run) -> None:
        self._hands, self.run = hands, run

    def note(self, event: str, stage: Stage | None = None, **data: object) -> None:
        """Append one record; ``stage``: the current one if left out. Raises CutoverError (``Exit.FAILED``)."""
        where = (stage or self.run.stage).value
        try:
            record = self._hands.journal.append(self.run.name, event, where, **data)
        except OSError as error:
            raise CutoverError(Exit.FAILED, f"journal {self._hands.journal.path}: {error.strerror}") from None
        self.run.take(record)

    def switch(self, mode: VerifyMode) -> list[PluginState]:
        """Switch the live server and return the state in which every rank says so. Nothing to do: does nothing."""
        states = self._hands.service.read()
        if {rank.mode for rank in ranks(states)} == {mode}:
            self.note("did", act="switch", mode=mode.value)
            return states
        self._hands.say(f"switching to {mode.value}")
        self.note("intend", act="switch", mode=mode.value)
        states = self._hands.service.switch(mode)
        self.note("did", act="switch", mode=mode.value)
        return states

    def write(self, contents: Mapping[Path, str | None], mode: str) -> None:
        """Write or remove owned files, so that the next start has ``mode``; proves it as far as the runner knows."""
        self._hands.say(f"{'writing' if any(contents.values()) else 'removing'} {', '.join(map(str, contents))}")
        self.note("intend", act="files", mode=mode)
        for path, content in contents.items():
            files.put(path, content)
        self._hands.runner.reload()
        found = self._hands.runner.next_start().get(MODE, VerifyMode.OFF.value)
        if found != mode:
            raise CutoverError(
                Exit.FAILED, f"the next start would have {MODE}={found}, not {mode}: something sets it later"
            )
        self.note("did", act="files", mode=mode)

    def restart(self, mode: str) -> None:
        """Restart the service, wait until it answers, and prove by process and probe that it has ``mode``.

        ``ABSENT`` for a server without the plugin. Raises CutoverError (``Exit.FAILED``).
        """
        old, serving = self._hands.runner.status().pid, self._serving()
        self._hands.say("restarting")
        self.note("intend", act="restart", mode=mode)
        self._hands.runner.restart()
        self.await_server(mode, old_main=old, old_serving=serving)
        if mode != ABSENT:
            started = self._hands.runner.environment(self._serving()).get(MODE, VerifyMode.OFF.value)
            if started != mode:
                raise CutoverError(Exit.FAILED, f"after the restart the main process has {MODE}={started}, not {mode}")
        self.note("did", act="restart", mode=mode)

    def await_server(self, mode: str | None, *, old_main: int = 0, old_serving: int = 0) -> None:
        """Wait until a process other than the old ones answers and, unless None, serves ``mode``.

        Raises CutoverError: at the deadline, when the unit failed, or when the server came up in another mode; else as
        ``_answer``.
        """
        began = told = time.monotonic()
        limit, watch = self.run.plan.health_seconds, _Watch(self.run.plan.unit)
        while True:
            self._hands.check()
            status = self._hands.runner.status()
            watch.look(status)
            if not old_main or status.pid not in (0, old_main):
                found = self._answer(old_serving)
                if found is not None and mode in (None, found):
                    return
                if found is not None:
                    raise CutoverError(Exit.FAILED, f"the server came up with mode {found}, not {mode}")
            waited = time.monotonic() - began
            if waited > limit:
                raise CutoverError(Exit.FAILED, f"the server did not answer within {limit:g} s")
            if time.monotonic() - told >= _TELL:
                told = time.monotonic()
                self._hands.say(f"waiting for {self.run.plan.url}: {waited:.0f} s of {limit:g} s")
            time.sleep(_POLL)

    def _answer(self, old_serving: int) -> str | None:
        """Return the mode that a new, healthy server has (or ABSENT), None while there is none.

        Raises AccessError: a key or a certificate that is refused now will be refused for ever.
        """
        try:
            self._hands.service.require_healthy()
            states = self._hands.service.read()
        except PluginMissingError:
            return ABSENT
        except AccessError:
            raise
        except ServerError:
            return None
        if old_serving in {rank.pid for rank in ranks(states)}:
            return None
        return mode_of(states).value

    def _serving(self) -> int:
        """Return a process that serves; 0: none is known."""
        try:
            return ranks(self._hands.service.read())[0].pid
        except ServerError:
            return 0
