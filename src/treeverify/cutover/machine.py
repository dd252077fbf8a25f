"""Runs a cutover stage by stage: does each stage's work, judges it, and rolls back whatever stops it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treeverify.control.schema import PluginState
from treeverify.cutover import gates
from treeverify.cutover.acts import Acts, Hands
from treeverify.cutover.evidence import Evidence
from treeverify.cutover.exits import Exit
from treeverify.cutover.plan import MODE, CutoverPlan, variables, why_restart
from treeverify.cutover.rollback import roll_back
from treeverify.cutover.samples import Plan, Progress, Sample
from treeverify.cutover.service import processes
from treeverify.cutover.stages import ENDED, Event, Stage, step
from treeverify.env import VerifyMode
from treeverify.errors import CutoverError, TreeverifyError

States = Sequence[PluginState]
_SOAK_LOOK = 5.0
"""Seconds between two looks at a soaking server."""


@dataclass(frozen=True)
class Judges:
    """How a server is asked and judged: ``samples.collect`` and ``gates.judge``."""

    collect: Callable[[str, Plan, Progress | None], Sample]
    judge: Callable[..., list[gates.Verdict]]


class Machine:
    """One run, from the stage that it is in to its end."""

    def __init__(self, hands: Hands, acts: Acts, judges: Judges, evidence: Evidence) -> None:
        self._hands, self._acts, self._judges, self._evidence = hands, acts, judges, evidence
        self._work = {
            Stage.OFF: self._off,
            Stage.VALIDATE: self._validate,
            Stage.SOAK: self._soak,
            Stage.EAGER_VALIDATE: self._eager_validate,
            Stage.EAGER: self._eager,
            Stage.GRAPHS_VALIDATE: self._graphs_validate,
            Stage.ON: self._on,
            Stage.UNIT: self._unit,
        }

    @property
    def _plan(self) -> CutoverPlan:
        return self._acts.run.plan

    def go(self) -> None:
        """Work until done. Raises CutoverError whose code says how it ended otherwise: rolled back, or stuck."""
        run, stage = self._acts.run, self._acts.run.stage
        try:
            while stage not in ENDED:
                self._acts.note("enter", stage)
                self._hands.say(f"stage {stage.value}")
                self._acts.note("passed", pids=processes(self._work[stage]()))
                stage = step(run.plan.stages, stage, Event.PASSED)
            self._acts.note("end", stage)
        except BaseException as error:  # whatever it was, the service goes back first
            reason = str(error) or type(error).__name__
            code = error.exit_code if isinstance(error, CutoverError) else Exit.FAILED
            code = code if code >= Exit.GATE else Exit.FAILED  # the lower ones say that nothing was begun
            self._hands.say(f"stopped in stage {stage.value}: {reason}; rolling back")
            roll_back(self._hands, self._acts, Event.STOPPED, reason)
            if not isinstance(error, TreeverifyError | OSError):
                raise
            done = f"stopped in stage {stage.value} and rolled back, proved: {reason}"
            raise CutoverError(code, done) from error

    def _off(self) -> States:
        reason = why_restart(self._plan, self._acts.run.before)
        if reason and not self._acts.run.restart_done:
            self._restart_with(VerifyMode.OFF)
        states = self._acts.switch(VerifyMode.OFF)
        if self._plan.target is not VerifyMode.OFF:
            self._evidence.keep("baseline", self._collect("baseline"), states)
            _require_same(processes(states), self._hands.service.read())
        return states

    def _validate(self) -> States:
        return self._gated(Stage.VALIDATE, self._serve(VerifyMode.VALIDATE), self._collect)

    def _soak(self) -> States:
        return self._gated(Stage.SOAK, self._serve(VerifyMode.VALIDATE), self._wait)

    def _eager_validate(self) -> States:
        self._restart_with(VerifyMode.VALIDATE, eager=True)
        return self._gated(Stage.EAGER_VALIDATE, self._acts.switch(VerifyMode.VALIDATE), self._collect)

    def _eager(self) -> States:
        return self._gated(Stage.EAGER, self._serve(VerifyMode.ON), self._collect)

    def _graphs_validate(self) -> States:
        self._restart_with(VerifyMode.VALIDATE)
        return self._gated(Stage.GRAPHS_VALIDATE, self._acts.switch(VerifyMode.VALIDATE), self._collect)

    def _on(self) -> States:
        return self._gated(Stage.ON, self._serve(VerifyMode.ON), self._collect)

    def _unit(self) -> States:
        target = self._plan.target
        if self._hands.runner.next_start().get(MODE, VerifyMode.OFF.value) != target.value:
            self._write(target)
        states = self._serve(target)
        self._evidence.keep("after", None, states)
        return states

    def _serve(self, mode: VerifyMode) -> States:
        """Switch to ``mode``; CutoverError unless the processes are, before and after, those of the last stage."""
        judged = self._acts.run.judged
        _require_same(judged, self._hands.service.read())
        states = self._acts.switch(mode)
        _require_same(judged, states)
        return states

    def _write(self, mode: VerifyMode, *, eager: bool = False) -> None:
        wanted = variables(self._plan, self._acts.run.before, mode, eager=eager)
        self._acts.write(self._hands.runner.contents(wanted), mode.value)

    def _restart_with(self, mode: VerifyMode, *, eager: bool = False) -> None:
        self._write(mode, eager=eager)
        self._acts.restart(mode.value)

    def _collect(self, name: str) -> Sample:
        def progress(done: int, total: int, what: str) -> None:
            self._hands.check()
            if done % 10 == 0 or done == total:
                self._hands.say(f"{name}: {done} of {total} requests")

        self._hands.check()
        return self._judges.collect(self._plan.url, self._plan.prompts, progress)

    def _wait(self, name: str) -> None:
        """Let the soak's time pass; what happened meanwhile is judged after it, but a dead server stops it at once."""
        until = time.monotonic() + self._plan.soak_seconds
        while (left := until - time.monotonic()) > 0:
            self._hands.check()
            self._hands.service.read()
            time.sleep(min(left, _SOAK_LOOK))

    def _gated(self, stage: Stage, before: States, work: Callable[[str], Sample | None]) -> States:
        """Do ``work`` in ``stage``, whose mode is already served, judge it, and return the states that were judged.

        Raises CutoverError (``Exit.GATE``).
        """
        baseline = self._evidence.sample("baseline")
        if baseline is None:
            raise CutoverError(Exit.FAILED, f"the baseline in {self._evidence.folder} is gone")
        kind: gates.Kind = "on" if stage in (Stage.EAGER, Stage.ON) else "soak" if stage is Stage.SOAK else "validate"
        sample = work(stage.value)
        after = self._hands.service.read()
        self._evidence.keep(stage.value, sample, after)
        limits = self._plan.limits
        if stage is Stage.EAGER:  # its baseline may run in graphs
            limits = limits.model_copy(update={"speed_ratio": None})
        verdicts = [
            verdict.model_copy(update={"stage": stage.value})
            for verdict in self._judges.judge(kind, baseline, sample, before, after, limits)
        ]
        for verdict in verdicts:
            self._acts.note("verdict", verdict=verdict.model_dump(mode="json"))
            self._hands.say(f"  {verdict.outcome} {verdict.gate}: {verdict.reason}")
        failed = [f"{verdict.gate}: {verdict.reason}" for verdict in verdicts if verdict.passed is False]
        if failed or not any(verdict.passed for verdict in verdicts):
            raise CutoverError(Exit.GATE, f"gate closed: {'; '.join(failed) or 'nothing was judged'}")
        return after


def _require_same(judged: tuple[int, ...], states: States) -> None:
    """Raise CutoverError unless the ``judged`` processes, and no others, serve now: a new one begins with nothing."""
    now = processes(states)
    if now != judged:
        known = ", ".join(map(str, judged)) or "none"
        raise CutoverError(
            Exit.FAILED,
            f"the server restarted: process {', '.join(map(str, now))} serves, the last stage was passed by {known}",
        )
