"""``treeverify cutover``: run, status, rollback. Exit codes: docs/cutover.md."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from treeverify.cutover.plan import CutoverPlan
    from treeverify.cutover.tool import Tool

app = typer.Typer(help="Move a live service to another verify mode, gated and reversible.", no_args_is_help=True)

Unit = Annotated[str, typer.Option(help="Unit, NAME.service; a name for the journal with --restart-command.")]
Url = Annotated[str, typer.Option(help="Address of the server, http://HOST:PORT.")]
User = Annotated[bool, typer.Option("--user", help="The unit is one of the user's own manager.")]
Command = Annotated[str | None, typer.Option(help="Without systemd: shell command that restarts the server.")]
File = Annotated[Path | None, typer.Option(help="With --restart-command: environment file that the start reads.")]
State = Annotated[Path | None, typer.Option(help="Folder of the unit's journal, lock and reports.")]


@app.command()
def run(
    unit: Unit,
    url: Url,
    to: Annotated[str, typer.Option(help="validate | on | off")],
    user: User = False,
    restart_command: Command = None,
    environment_file: File = None,
    state: State = None,
    allow_restart: Annotated[bool, typer.Option("--allow-restart", help="Restart the server where needed.")] = False,
    eager: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE that starts the server without CUDA graphs: a stage with it.")
    ] = None,
    soak: Annotated[float, typer.Option(min=0, help="Seconds under validate before on.")] = 600.0,
    settings: Annotated[Path | None, typer.Option(help="JSON: variables, prompts, limits (docs/cutover.md).")] = None,
    without_logprobs: Annotated[
        bool,
        typer.Option("--without-logprobs", help="Go on where the server gives none: what needs them is not judged."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; change nothing.")] = False,
) -> None:
    """Go to a mode by stages, each behind its gate; any failure rolls back. Goes on where an earlier run was killed."""
    plan = _plan(unit, url, to, allow_restart, eager or [], soak, settings, not without_logprobs)
    tool = _tool(unit, url, user, restart_command, environment_file, state, plan.health_seconds)
    if dry_run:
        for line in tool.plan_lines(plan):
            print(line)
        return
    replace(tool, check=_interrupts("stopping at the next safe point, then rolling back")).run(plan)


@app.command()
def status(
    unit: Unit,
    url: Url,
    user: User = False,
    restart_command: Command = None,
    environment_file: File = None,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what the journal holds, what there is, and whether the one explains the other. Changes nothing."""
    from treeverify.cutover.verdict import Verdict

    found = _tool(unit, url, user, restart_command, environment_file, state).status()
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if name != "verdicts":
            print(f"{name.replace('_', ' ')}: {value}")
        else:
            assert isinstance(value, list)
            for verdict in map(Verdict.model_validate, value):
                print(f"  {verdict.stage} {verdict.gate}: {verdict.outcome}: {verdict.reason}")


@app.command()
def rollback(
    unit: Unit,
    url: Url,
    user: User = False,
    restart_command: Command = None,
    environment_file: File = None,
    state: State = None,
) -> None:
    """Take the last run back, finished or not; proved, or it says what is left and what to type."""
    tool = _tool(unit, url, user, restart_command, environment_file, state)
    _interrupts("a rollback goes on to its end")
    tool.rollback()


def _plan(
    unit: str,
    url: str,
    to: str,
    allow_restart: bool,
    eager: list[str],
    soak: float,
    settings: Path | None,
    logprobs: bool,
) -> CutoverPlan:
    from pydantic import ValidationError

    from treeverify.cutover.plan import CutoverPlan
    from treeverify.cutover.settings import Settings, first_fault
    from treeverify.env import parse_verify_mode
    from treeverify.errors import ConfigError

    target, chosen = parse_verify_mode(to, "--to"), Settings.load(settings)
    pairs = [word.partition("=") for word in eager]
    if not all(name and equals for name, equals, _ in pairs):
        raise ConfigError(f"--eager: expected NAME=VALUE, got {' '.join(eager)!r}")
    try:
        return CutoverPlan(
            unit=unit,
            url=url,
            target=target,
            may_restart=allow_restart,
            variables=chosen.variables,
            eager={name: value for name, _, value in pairs},
            soak_seconds=soak,
            health_seconds=chosen.health_seconds,
            prompts=chosen.prompts(logprobs=logprobs),
            limits=chosen.limits,
        )
    except ValidationError as error:
        raise ConfigError(first_fault(error)) from None


def _tool(
    unit: str,
    url: str,
    user: bool,
    restart_command: str | None,
    environment_file: Path | None,
    state: Path | None,
    health_seconds: float = 1800.0,
) -> Tool:
    from treeverify.cutover.runner import CommandRunner, Runner, SystemdRunner
    from treeverify.cutover.service import LiveService
    from treeverify.cutover.tool import Tool, default_folder
    from treeverify.errors import ConfigError

    if (restart_command is None) != (environment_file is None):
        raise ConfigError("--restart-command and --environment-file go together")
    if "/" in unit or unit in ("", ".", ".."):
        raise ConfigError(f"--unit: expected a unit's name, got {unit!r}")
    runner: Runner
    if restart_command is not None and environment_file is not None:
        runner = CommandRunner(restart_command, environment_file, timeout=health_seconds)
    elif unit.endswith(".service"):
        runner = SystemdRunner(unit, user=user)
    else:
        raise ConfigError(f"--unit: expected NAME.service, got {unit!r}")
    folder = state or default_folder(unit, user=user)
    return Tool(unit, url, folder, runner, LiveService(url), _say)


def _say(line: str) -> None:
    """Print to standard error: unbuffered, as a signal handler may do; a terminal that is gone stops nothing."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def _interrupts(answer: str) -> Callable[[], None]:
    """Answer INT, TERM and HUP so from now on; returns what raises CutoverError once one has come."""
    import signal

    from treeverify.cutover.exits import Exit
    from treeverify.errors import CutoverError

    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)
        _say(f"{signal.Signals(number).name}: {answer}")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, note)

    def check() -> None:
        if came:
            raise CutoverError(Exit.INTERRUPTED, f"{signal.Signals(came[0]).name} received")

    return check
