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
from treeverify.cutover.stages import ENDED, Event, Stage, step
from treeverify.env import VerifyMode
from treeverify.errors import CutoverError, TreeverifyError

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
            Stage.EAGER: self._eager,
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
                self._work[stage]()
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

    def _off(self) -> None:
        reason = why_restart(self._plan, self._acts.run.before)
        if reason and not self._acts.run.restart_done:
            self._restart_with(VerifyMode.OFF)
        states = self._acts.switch(VerifyMode.OFF)
        if self._plan.target is not VerifyMode.OFF:
            self._evidence.keep("baseline", self._collect("baseline"), states)

    def _validate(self) -> None:
        self._gated(Stage.VALIDATE, self._acts.switch(VerifyMode.VALIDATE), self._collect)

    def _soak(self) -> None:
        self._gated(Stage.SOAK, self._acts.switch(VerifyMode.VALIDATE), self._wait)

    def _eager(self) -> None:
        self._restart_with(VerifyMode.ON, eager=True)
        self._gated(Stage.EAGER, self._acts.switch(VerifyMode.ON), self._collect)

    def _on(self) -> None:
        if self._plan.eager:
            self._restart_with(VerifyMode.ON)
        self._gated(Stage.ON, self._acts.switch(VerifyMode.ON), self._collect)

    def _unit(self) -> None:
        target = self._plan.target
        if self._hands.runner.next_start().get(MODE, VerifyMode.OFF.value) != target.value:
            self._write(target)
        self._evidence.keep("after", None, self._acts.switch(target))

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

    def _gated(self, stage: Stage, before: Sequence[PluginState], work: Callable[[str], Sample | None]) -> None:
        """Do ``work`` in ``stage``, whose mode is already served, and judge it; raises CutoverError (``Exit.GATE``)."""
        baseline = self._evidence.sample("baseline")
        if baseline is None:
            raise CutoverError(Exit.FAILED, f"the baseline in {self._evidence.folder} is gone")
        name: gates.Stage = "on" if stage in (Stage.EAGER, Stage.ON) else "soak" if stage is Stage.SOAK else "validate"
        sample = work(stage.value)
        after = self._hands.service.read()
        self._evidence.keep(stage.value, sample, after)
        limits = self._plan.limits
        if stage is Stage.EAGER:  # its baseline may run in graphs
            limits = limits.model_copy(update={"speed_ratio": None})
        verdicts = self._judges.judge(name, baseline, sample, before, after, limits)
        for verdict in verdicts:
            self._acts.note("verdict", verdict=verdict.model_dump(mode="json"))
            self._hands.say(f"  {'passed' if verdict.passed else 'FAILED'} {verdict.gate}: {verdict.reason}")
        failed = [f"{verdict.gate}: {verdict.reason}" for verdict in verdicts if not verdict.passed]
        if failed or not verdicts:
            raise CutoverError(Exit.GATE, f"gate closed: {'; '.join(failed) or 'nothing was judged'}")
