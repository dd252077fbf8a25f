"""What an operator asks for, what was found before the start, and both as a text."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from treeverify.cutover import samples
from treeverify.cutover.files import Place
from treeverify.cutover.limits import Limits
from treeverify.cutover.stages import Stage, path, served
from treeverify.env import VerifyMode

NEEDS_LOGPROBS = ("logprob", "top-1", "top-k", "kl")
"""Gates that nothing can be said of without log-probabilities."""
MODE, ALLOW = "KDTREE_VERIFY", "KDTREE_VERIFY_ALLOW"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CutoverPlan(_Frozen):
    """One cutover, complete: two runs with equal plans do the same."""

    unit: str
    url: str
    target: VerifyMode
    may_restart: bool = False
    variables: dict[str, str] = Field(default={}, description="set at every start from now on, beside the mode")
    eager: dict[str, str] = Field(default={}, description="set for the eager stage only; empty: no such stage")
    soak_seconds: float = Field(default=600.0, ge=0)
    health_seconds: float = Field(default=1800.0, gt=0, description="for a restart until the server answers")
    prompts: samples.Plan
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        path(self.target, eager=bool(self.eager))
        if (self.eager or self.variables) and not self.may_restart:
            raise ValueError("--eager and variables need --allow-restart: they are read at a start only")
        if {MODE, ALLOW} & {*self.eager, *self.variables}:
            raise ValueError(f"--eager, variables: {MODE} and {ALLOW} are set by the cutover itself")
        return self

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of work, in order."""
        return path(self.target, eager=bool(self.eager))

    @property
    def modes(self) -> tuple[VerifyMode, ...]:
        """Modes that the server must be able to take on the way."""
        return tuple(mode for mode in VerifyMode if mode in {served(stage, self.target) for stage in self.stages})


class Before(_Frozen):
    """What there was before the first change: what a rollback goes back to."""

    plugin: bool
    mode: VerifyMode | None = Field(description="that the server serves; None without the plugin")
    allowed: tuple[VerifyMode, ...]
    serving_pid: int
    main_pid: int
    next_start: dict[str, str] = Field(description=f"{MODE} and {ALLOW} of the next start, where they are set")
    files: dict[str, str | None] = Field(description="owned files, None: not there")
    places: dict[str, Place] = Field(description="the same files: link, mode, owner")

    @property
    def next_mode(self) -> str:
        """Mode of the next start."""
        return self.next_start.get(MODE, VerifyMode.OFF.value)


def why_restart(plan: CutoverPlan, before: Before) -> str | None:
    """Return why the live server cannot take every mode of ``plan`` without a restart; None: it can."""
    if not before.plugin:
        return "the plugin is not loaded in it"
    missing = [mode.value for mode in plan.modes if mode not in before.allowed]
    if missing:
        allowed = ", ".join(before.allowed)
        return f"it may be switched to {allowed} only, not to {', '.join(missing)} ({ALLOW} at its start)"
    return "variables are set for it" if plan.variables else None


def variables(plan: CutoverPlan, before: Before, mode: VerifyMode, *, eager: bool = False) -> dict[str, str]:
    """Return what the owned environment file sets so that the next start has ``mode``."""
    allowed = {*before.allowed, *plan.modes, mode}
    allow = ",".join(known.value for known in VerifyMode if known in allowed)
    return {MODE: mode.value, ALLOW: allow, **plan.variables, **(plan.eager if eager else {})}


_WORK = {
    Stage.OFF: "serve off, sample the baseline",
    Stage.VALIDATE: "switch to validate, put the prompts, gate: parity, shapes, generation, errors",
    Stage.SOAK: "stay in validate, gate: parity, shapes, errors",
    Stage.EAGER_VALIDATE: "restart with validate and the eager variables, put the prompts, gate: as validate",
    Stage.EAGER: "switch that process to on, put the prompts, gate: as on; speed is recorded only",
    Stage.GRAPHS_VALIDATE: "restart with validate and without the eager variables, put the prompts, gate: as validate",
    Stage.ON: "switch to on, put the prompts, gate: shapes, generation, statistics, speed, errors",
    Stage.UNIT: "make the unit match, so that a later restart keeps the mode",
}


def describe(plan: CutoverPlan, before: Before, files: list[str]) -> list[str]:
    """Return the plan as lines for an operator."""
    now = before.mode.value if before.mode else "no plugin"
    reason = why_restart(plan, before)
    lines = [
        f"{plan.unit} at {plan.url}: {now} now, {before.next_mode} at its next start; to {plan.target.value}",
        f"restart first: {'yes, ' + reason if reason else 'no, the switch is live'}",
    ]
    for number, stage in enumerate(plan.stages, start=1):
        extra = f" for {plan.soak_seconds:g} s" if stage is Stage.SOAK else ""
        lines.append(f"{number}. {stage.value}{extra}: {_WORK[stage]}")
    if not plan.prompts.logprobs:
        lines.append(f"without log-probabilities: not judged: {', '.join(NEEDS_LOGPROBS)}, texts that part")
    lines.append(f"files that it owns: {', '.join(files)}")
    lines.append("any failure on the way: back to what there is now, proved by the probe")
    return lines
