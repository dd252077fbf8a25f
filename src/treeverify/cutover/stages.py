"""The stages of a cutover as a pure state machine: a table of transitions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from treeverify.env import VerifyMode
from treeverify.errors import ContractError


class Stage(StrEnum):
    """Where a cutover is. The first eight are work on the way to the target, in this order."""

    OFF = "off"  # the baseline serves and is sampled; a restart, if one is needed, happens here
    VALIDATE = "validate"  # both run, the baseline serves; a fixed plan of prompts is the load
    SOAK = "soak"  # the same for a stated time, with whatever the service gets
    EAGER_VALIDATE = "validate-eager"  # a new process without CUDA graphs, validated; only where the operator asks
    EAGER = "on-eager"  # ours serves in that process
    GRAPHS_VALIDATE = "validate-graphs"  # a new process with graphs again, validated; only after an eager one
    ON = "on"  # ours serves
    UNIT = "unit"  # the unit is made to match, so that a later restart keeps the mode
    DONE = "done"
    ROLLBACK = "rollback"  # everything goes back to what was there before
    ROLLED_BACK = "rolled-back"
    STUCK = "stuck"  # the rollback failed; the journal says what is left


class Event(StrEnum):
    """What ends a stage."""

    PASSED = "passed"  # its work is done and its gate is open
    STOPPED = "stopped"  # a gate, an error or a signal
    RESTORED = "restored"  # the rollback is proved
    NOT_RESTORED = "not-restored"
    ASKED = "asked"  # the operator asks for the rollback


RESTARTS = frozenset({Stage.EAGER_VALIDATE, Stage.GRAPHS_VALIDATE})
"""Stages that begin with a new process: nothing that was found of another one counts for it."""
ENDED = frozenset({Stage.DONE, Stage.ROLLED_BACK, Stage.STUCK})
"""Stages in which no tool is at work."""


def path(target: VerifyMode, *, eager: bool = False) -> tuple[Stage, ...]:
    """Return the stages of work to ``target``, in order. Raises ContractError for ``eager`` without target ``on``."""
    if eager and target is not VerifyMode.ON:
        raise ContractError.of("cutover", "eager", "target on", f"target {target.value}")
    if target is VerifyMode.OFF:
        return (Stage.OFF, Stage.UNIT)
    checked = (Stage.OFF, Stage.VALIDATE, Stage.SOAK)
    if target is VerifyMode.VALIDATE:
        return (*checked, Stage.UNIT)
    without_graphs = (Stage.EAGER_VALIDATE, Stage.EAGER, Stage.GRAPHS_VALIDATE) if eager else ()
    return (*checked, *without_graphs, Stage.ON, Stage.UNIT)


def transitions(stages: tuple[Stage, ...]) -> Mapping[tuple[Stage, Event], Stage]:
    """Return the table of a cutover whose stages of work are ``stages``: every move that there is."""
    table = dict(zip(((stage, Event.PASSED) for stage in stages), (*stages[1:], Stage.DONE), strict=True))
    table |= {(stage, Event.STOPPED): Stage.ROLLBACK for stage in stages}
    table |= {(stage, Event.ASKED): Stage.ROLLBACK for stage in (*stages, Stage.DONE, Stage.STUCK, Stage.ROLLBACK)}
    table[Stage.ROLLBACK, Event.RESTORED] = Stage.ROLLED_BACK
    table[Stage.ROLLBACK, Event.NOT_RESTORED] = Stage.STUCK
    return MappingProxyType(table)


def step(stages: tuple[Stage, ...], stage: Stage, event: Event) -> Stage:
    """Return the stage after ``event`` in ``stage``; raises ContractError where the table has no such move."""
    try:
        return transitions(stages)[stage, event]
    except KeyError:
        raise ContractError.of("cutover", "event", f"one that stage {stage.value} knows", event.value) from None


def served(stage: Stage, target: VerifyMode) -> VerifyMode:
    """Return the mode that the server has while ``stage``, a stage of work or ``done``, is left by ``passed``."""
    modes = {
        Stage.OFF: VerifyMode.OFF,
        Stage.VALIDATE: VerifyMode.VALIDATE,
        Stage.SOAK: VerifyMode.VALIDATE,
        Stage.EAGER_VALIDATE: VerifyMode.VALIDATE,
        Stage.EAGER: VerifyMode.ON,
        Stage.GRAPHS_VALIDATE: VerifyMode.VALIDATE,
        Stage.ON: VerifyMode.ON,
    }
    return modes.get(stage, target)
