"""``run``, ``status`` and ``rollback`` of one unit: lock, journal, preflight, then the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from treeverify.control.http import port
from treeverify.cutover import files, gates, report, samples
from treeverify.cutover.acts import Acts, Hands
from treeverify.cutover.evidence import Evidence
from treeverify.cutover.exits import Exit
from treeverify.cutover.history import Run, last_run, units
from treeverify.cutover.journal import Journal
from treeverify.cutover.lock import hold, hold_name
from treeverify.cutover.machine import Judges, Machine
from treeverify.cutover.plan import Before, CutoverPlan, describe, why_restart
from treeverify.cutover.preflight import look, require_access, require_calls, require_path
from treeverify.cutover.rollback import live_mode, roll_back
from treeverify.cutover.runner import Runner
from treeverify.cutover.service import Service, ranks
from treeverify.cutover.stages import Event, Stage
from treeverify.errors import CutoverError, ServerError


def default_folder(unit: str, *, user: bool) -> Path:
    """Return where a unit's journal and reports are kept."""
    base = Path.home() / ".local/state" if user else Path("/var/lib")
    return base / "treeverify/cutover" / unit


@dataclass(frozen=True)
class Tool:
    """One unit and its server, as an operator's command names them."""

    unit: str
    url: str
    folder: Path
    runner: Runner
    service: Service
    say: Callable[[str], None]
    check: Callable[[], None] = lambda: None
    judges: Judges = field(default_factory=lambda: Judges(samples.collect, gates.judge))

    def plan_lines(self, plan: CutoverPlan) -> list[str]:
        """Return what ``run`` would do; changes nothing. Raises what ``run`` raises before its first change."""
        run = last_run(self._journal().records)
        if run is not None and not run.ended:
            return [f"run {run.name} was cut off in stage {run.stage.value}: it goes on, or is rolled back"]
        with self._alone():
            before = self._look()
            self._require(plan, before)
        return describe(plan, before, list(before.files))

    def run(self, plan: CutoverPlan) -> None:
        """Carry out ``plan``, or go on with it where an earlier run was cut off.

        Raises CutoverError; from code 20 on, the run was stopped and rolled back.
        """
        if not os.path.exists(self.folder):
            with self._alone():  # no folder is made for a unit or a server that is not there
                self._require(plan, self._look())
        with self._locked() as hands:
            run = last_run(hands.journal.records)
            if run is not None and run.stage is Stage.STUCK:
                raise CutoverError(
                    Exit.STUCK, f"the rollback of run {run.name} failed; `treeverify cutover rollback` first"
                )
            if run is not None and not run.ended:
                self._go_on(hands, run, plan)
                return
            before = self._look()
            self._require(plan, before)
            if self._nothing_to_do(plan, before):
                self.say(f"{plan.unit} serves {plan.target.value}, and so will its next start: nothing to do")
                return
            name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}"
            run = Run(name, plan, before)
            data = {"plan": plan.model_dump(mode="json"), "before": before.model_dump(mode="json")}
            run = last_run([hands.journal.append(name, "begin", Stage.OFF.value, **data)])
            assert run is not None
            self._go(hands, run)

    def rollback(self) -> None:
        """Take the last run back, finished or not. Raises CutoverError (``Exit.STUCK``) where that fails."""
        self.runner.check()
        if not os.path.exists(self.folder):  # none is made for it
            with self._alone():
                self.say("nothing to roll back")
            return
        with self._locked() as hands:
            run = last_run(hands.journal.records)
            if run is None or run.stage is Stage.ROLLED_BACK:
                self.say("nothing to roll back")
                return
            self._same_server(run)
            require_access(self.service)
            self._back(hands, run, "asked for by the operator")
            self.say(f"run {run.name} is rolled back, proved")

    def status(self) -> dict[str, object]:
        """Return what the journal says and what there is, and whether the one explains the other. Changes nothing."""
        run = last_run(self._journal().records)
        found: dict[str, object] = {"unit": self.unit, "journal": str(self.folder / "journal.jsonl")}
        hands = Hands(self.runner, self.service, self._journal(), self.say)
        try:
            live: str | None = live_mode(hands)
        except ServerError as error:
            live, found["server"] = None, str(error)
        doubt = self._doubt()
        found |= {} if doubt is None else {"doubt": doubt}
        next_mode = self.runner.next_start().get("KDTREE_VERIFY", "off")
        found |= {"live": live, "next_start": next_mode, "run": None}
        if run is not None:
            explained = live in run.live and next_mode in run.next_start
            found |= {"run": run.name, "target": run.plan.target.value, "stage": run.stage.value, "reason": run.reason}
            found |= {"explained": explained, "verdicts": run.verdicts, "report": str(self._report_path(run))}
        return found

    @contextmanager
    def _locked(self) -> Iterator[Hands]:
        self.runner.check()
        files.require_writable(self.folder / "journal.jsonl")
        self.folder.mkdir(parents=True, exist_ok=True)
        with hold(self.folder / "lock"), self._alone():
            yield Hands(self.runner, self.service, self._journal(), self.say, self.check)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold what tells this service on this machine, whichever state folder an operator names."""
        with ExitStack() as held:
            for name in (*self.runner.names(), f"port {_port(self.url)}"):
                held.enter_context(hold_name(name))
            yield

    def _journal(self) -> Journal:
        journal = Journal(self.folder / "journal.jsonl")
        for unit in sorted(units(journal.records) - {self.unit}):
            raise CutoverError(Exit.OTHER_JOURNAL, f"{journal.path} is the journal of {unit}, not of {self.unit}")
        return journal

    def _doubt(self) -> str | None:
        """Return why the next start may not be what it seems, None: no reason is known."""
        try:
            return self.runner.doubt(ranks(self.service.read())[0].pid)
        except ServerError:
            return None
        except CutoverError as error:
            return str(error)

    def _look(self) -> Before:
        files.require_writable(self.folder / "journal.jsonl")
        return look(self.url, self.runner, self.service)

    def _require(self, plan: CutoverPlan, before: Before) -> None:
        require_path(plan, before)
        if not self._nothing_to_do(plan, before):
            require_calls(plan, before, self.service)

    def _nothing_to_do(self, plan: CutoverPlan, before: Before) -> bool:
        return before.mode is plan.target and before.next_mode == plan.target.value and not why_restart(plan, before)

    def _same_server(self, run: Run) -> None:
        if run.plan.url != self.url:
            raise CutoverError(Exit.OTHER_JOURNAL, f"the run {run.name} is of {run.plan.url}, not of {self.url}")
        owned = {str(path) for path in self.runner.contents({})}
        if owned != set(run.before.files):
            known = ", ".join(run.before.files)
            raise CutoverError(Exit.OTHER_JOURNAL, f"the run {run.name} owns {known}, not {', '.join(sorted(owned))}")

    def _go_on(self, hands: Hands, run: Run, plan: CutoverPlan) -> None:
        """Resume a run that was cut off, if that is what was asked for and the server is where the run left it."""
        self._same_server(run)
        require_access(self.service)
        cut_off = f"run {run.name} was cut off in stage {run.stage.value}"
        obstacle = _obstacle(hands, run, plan)
        if obstacle is None:
            self.say(f"{cut_off}: it goes on there")
            self._go(hands, run)
            return
        reason = f"{cut_off} and cannot go on: {obstacle}"
        self.say(f"{reason}; rolling back")
        self._back(hands, run, reason)
        raise CutoverError(Exit.FAILED, f"{reason}; it is rolled back now, proved. Start again")

    def _go(self, hands: Hands, run: Run) -> None:
        acts = Acts(hands, run)
        try:
            Machine(hands, acts, self.judges, Evidence(self.folder / run.name)).go()
        finally:
            self._report(run)
        self.say(f"done: {run.plan.unit} serves {run.plan.target.value}, and so will its next start")

    def _back(self, hands: Hands, run: Run, reason: str) -> None:
        try:
            roll_back(replace(hands), Acts(hands, run), Event.ASKED, reason)
        finally:
            self._report(run)

    def _report_path(self, run: Run) -> Path:
        return self.folder / run.name / "parity-report.html"

    def _report(self, run: Run) -> None:
        """Write the report; a report that cannot be written does not change how the run ended."""
        evidence = Evidence(self.folder / run.name)
        events = [
            {"at": record.at, "event": record.event, "stage": record.stage, "detail": _detail(record.data)}
            for record in run.events
        ]
        try:
            evidence.folder.mkdir(exist_ok=True)
            verdicts = [gates.Verdict.model_validate(verdict) for verdict in run.verdicts]
            path = report.write(self._report_path(run), events, verdicts, evidence.samples(), evidence.states())
            self.say(f"report: {path}")
        except Exception as error:  # noqa: BLE001  (whatever it is, it must not hide how the run ended)
            self.say(f"no report: {type(error).__name__}: {error}")


def _obstacle(hands: Hands, run: Run, plan: CutoverPlan) -> str | None:
    """Return why ``run``, which was cut off, cannot go on with ``plan``; None: it can."""
    if run.stage is Stage.ROLLBACK:
        return "it was being rolled back"
    if run.plan != plan:
        return "other options, settings or prompts than it began with"
    try:
        live = live_mode(hands)
    except ServerError as error:
        return str(error)
    left = " or ".join(sorted(run.live))
    return None if live in run.live else f"the server has mode {live}, the run left it in {left}"


def _port(url: str) -> int:
    """Return the port of ``url``: a server has several names on its machine, and one port."""
    try:
        return port(url)
    except ServerError as error:
        raise CutoverError(Exit.UNREACHABLE, str(error)) from None


def _detail(data: object) -> str:
    if not isinstance(data, dict):
        return ""
    if "verdict" in data:
        verdict = gates.Verdict.model_validate(data["verdict"])
        return f"{verdict.gate}: {verdict.outcome}: {verdict.reason}"
    return ", ".join(f"{name} {value}" for name, value in data.items() if name in ("act", "mode", "reason", "left"))
