"""Back to what was there before the first change, and the proof of it; or what is left and what to type."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from treeverify.cutover import files
from treeverify.cutover.acts import Acts, Hands
from treeverify.cutover.exits import Exit
from treeverify.cutover.history import ABSENT
from treeverify.cutover.plan import MODE
from treeverify.cutover.service import mode_of
from treeverify.cutover.stages import Event, Stage, step
from treeverify.env import VerifyMode
from treeverify.errors import (
    AccessError,
    CutoverError,
    PluginMissingError,
    ServerError,
    SwitchError,
    TreeverifyError,
)


def roll_back(hands: Hands, acts: Acts, event: Event, reason: str) -> None:
    """Take the run of ``acts`` back, proved; raises CutoverError (``Exit.STUCK``) where that fails.

    A process that the cutover restarted is restarted once more, with the files as they were: only so is its
    environment what it was. Any other is switched live. A signal during the rollback is not obeyed.
    """
    run = acts.run
    hands.check = lambda: None
    try:
        acts.note("stop", reason=reason)
        acts.note("enter", step(run.plan.stages, run.stage, event))
        _restore(hands, acts)
        _prove(hands, acts)
        acts.note("end", Stage.ROLLED_BACK)
    except BaseException as error:
        left = _what_is_left(hands, acts)
        try:
            acts.note("end", Stage.STUCK, reason=str(error), left=left)
        except CutoverError as untold:
            left = f"{left}. {untold}"
        said = f"the rollback failed: {error or type(error).__name__}. It began because: {reason}. {left}"
        raise CutoverError(Exit.STUCK, said) from error


def _restore(hands: Hands, acts: Acts) -> None:
    """First the live switch, where there is one: from then on the service answers as before. Then the files. What is
    only waited for, the server's health, comes last, so that nothing wrong there holds the way back up."""
    run, before = acts.run, acts.run.before
    anew = run.restarted or hands.runner.status().active in ("failed", "inactive")
    failure = None if anew else _tried(lambda: _switch_live(acts))
    # last written, first removed: a drop-in never names a file that is not there
    contents = {path: before.files[str(path)] for path in reversed(hands.runner.contents({}))}
    changed = any(files.read(path) != content for path, content in contents.items())
    if changed or hands.runner.stale():  # killed between the files and the reload
        acts.write(contents, before.next_mode)
    for path in contents:
        files.settle(path, before.places[str(path)])
    if not anew and failure is None:
        failure = _tried(lambda: acts.await_server(None))
    if failure is not None:
        if not run.plan.may_restart:
            raise failure
        hands.say(f"{failure}; restarting it instead")
    if anew or failure is not None:
        acts.restart(before.next_mode if before.plugin else ABSENT)
        if before.mode is not None:
            acts.switch(before.mode)


def _tried(act: Callable[[], object]) -> CutoverError | ServerError | None:
    """Return what ``act`` raised, None if it did what it should."""
    try:
        act()
    except (CutoverError, ServerError) as error:
        return error
    return None


def _switch_live(acts: Acts) -> None:
    """Switch to the old mode at once; a server that does not answer, since it is starting, is waited for."""
    mode = acts.run.before.mode
    if mode is None:
        return
    try:
        acts.switch(mode)
    except (AccessError, SwitchError):
        raise
    except ServerError:
        acts.await_server(None)
        acts.switch(mode)


def _prove(hands: Hands, acts: Acts) -> None:
    before = acts.run.before
    for path, content in before.files.items():
        if files.read(Path(path)) != content:
            raise CutoverError(Exit.FAILED, f"{path} is not as it was")
        now, was = files.place(Path(path)), before.places[path]
        if now != was:
            raise CutoverError(Exit.FAILED, f"{path}: expected {_said(was)} as before, got {_said(now)}")
    next_mode = hands.runner.next_start().get(MODE, VerifyMode.OFF.value)
    if next_mode != before.next_mode:
        raise CutoverError(
            Exit.FAILED, f"the next start would have {MODE}={next_mode}, before it was {before.next_mode}"
        )
    live = live_mode(hands)
    if live != (before.mode.value if before.mode else ABSENT):
        raise CutoverError(Exit.FAILED, f"the server has mode {live}, before it was {before.mode or ABSENT}")


def _said(place: files.Place) -> str:
    if place.mode is None:
        return f"no file {place.target}"
    return f"{place.target} of {place.owner}:{place.group}, mode {place.mode:o}"


def live_mode(hands: Hands) -> str:
    """Return the mode of the live server, ``ABSENT`` without the plugin; raises ServerError and its kinds."""
    try:
        return mode_of(hands.service.read()).value
    except PluginMissingError:
        return ABSENT


def _what_is_left(hands: Hands, acts: Acts) -> str:
    """Return the state that is left and the commands that end it, each as far as it can still be found out."""
    before, plan = acts.run.before, acts.run.plan
    try:
        server = f"the server has mode {live_mode(hands)}"
    except ServerError as error:
        server = f"the server's mode is unknown ({error})"
    try:
        unit = f"the next start would have {MODE}={hands.runner.next_start().get(MODE, VerifyMode.OFF.value)}"
    except TreeverifyError as error:
        unit = f"its next start is unknown ({error})"
    there = [path for path in before.files if Path(path).exists()]
    owned = f"files of this tool that are there: {', '.join(there) or 'none'}"
    wanted = f"before it was mode {before.mode or ABSENT}, next start {before.next_mode}"
    options = ["--unit", plan.unit, "--url", plan.url, "--state", str(hands.journal.path.parent.absolute())]
    commands = [f"treeverify cutover rollback {shlex.join([*options, *hands.runner.options()])}"]
    try:
        commands += [" && ".join(hands.runner.undo_commands())]
    except TreeverifyError as error:
        commands += [f"(no commands for the unit: {error})"]
    return f"Left: {server}; {unit}; {owned}; {wanted}. Type: {commands[0]}; if that fails too: {commands[1]}"
