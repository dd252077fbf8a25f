"""Everything that can be found wrong before anything is touched."""

from __future__ import annotations

from treeverify.control.schema import RankState
from treeverify.cutover import files
from treeverify.cutover.exits import Exit
from treeverify.cutover.plan import ALLOW, MODE, NEEDS_LOGPROBS, Before, CutoverPlan, why_restart
from treeverify.cutover.runner import Runner
from treeverify.cutover.service import Service, mode_of, ranks
from treeverify.env import VerifyMode
from treeverify.errors import AccessError, CutoverError, PluginMissingError, ServerError, SwitchError


def look(url: str, runner: Runner, service: Service) -> Before:
    """Return what there is now. Raises CutoverError: no unit, no permission, no server, a foreign file or process."""
    runner.check()
    status = runner.status()
    if status.active not in ("", "active"):
        raise CutoverError(Exit.UNREACHABLE, f"the unit is {status.active}: start it, and wait until it is up")
    if runner.stale():
        raise CutoverError(
            Exit.NOT_SWITCHABLE, "the unit's files changed since systemd read them: `systemctl daemon-reload` first"
        )
    paths = list(runner.contents({}))
    owned = {str(path): files.read(path) for path in paths}
    environment = runner.next_start()
    try:
        mode, serving = _served(service)
        service.require_healthy()
    except ServerError as error:
        raise CutoverError(Exit.UNREACHABLE, str(error)) from None
    strangers = [rank.pid for rank in serving if not runner.owns(rank.pid)]
    if strangers:
        raise CutoverError(
            Exit.OTHER_PROCESS,
            f"{url} is served by process {strangers[0]}, which is not part of the unit (or runs in a container)",
        )
    doubt = runner.doubt(serving[0].pid) if serving else None
    if doubt is not None:
        raise CutoverError(Exit.NOT_SWITCHABLE, doubt)
    return Before(
        plugin=bool(serving),
        mode=mode,
        allowed=tuple(found for found in serving[0].allowed if all(found in rank.allowed for rank in serving))
        if serving
        else (),
        serving_pid=serving[0].pid if serving else 0,
        main_pid=status.pid,
        next_start={name: environment[name] for name in (MODE, ALLOW) if name in environment},
        files=owned,
        places={str(path): files.place(path) for path in paths},
    )


def require_path(plan: CutoverPlan, before: Before) -> None:
    """Raise CutoverError where ``plan`` needs a restart that the operator has not allowed."""
    reason = why_restart(plan, before)
    if reason is None or plan.may_restart:
        return
    code = Exit.NOT_SWITCHABLE if before.plugin else Exit.NO_PLUGIN
    raise CutoverError(
        code, f"the server at {plan.url}: {reason}; nothing was changed. --allow-restart lets it restart"
    )


def require_calls(plan: CutoverPlan, before: Before, service: Service) -> None:
    """Put, once, each call of the run that ``look`` has not put: what is refused is found before anything is touched.

    The switch is one to the mode that the server has. Hold the server's lock meanwhile: another cutover may be about
    to change that mode. Raises CutoverError; ``Exit.NO_LOGPROBS`` where the gates need what the server does not give.
    """
    refusal = None
    try:
        if before.mode is not None:
            service.switch(before.mode)
        if plan.target is not VerifyMode.OFF:
            refusal = service.refuses_logprobs(plan.prompts)
    except SwitchError as error:
        raise CutoverError(Exit.NOT_SWITCHABLE, f"not even to the mode that it has: {error}") from None
    except ServerError as error:
        raise CutoverError(Exit.UNREACHABLE, str(error)) from None
    if refusal is not None:
        raise CutoverError(
            Exit.NO_LOGPROBS,
            f"the server at {plan.url} gives no log-probabilities ({refusal}); nothing was changed. "
            f"--without-logprobs goes on and leaves {', '.join(NEEDS_LOGPROBS)} and texts that part not judged",
        )


def require_access(service: Service) -> None:
    """Raise CutoverError where a server is there that this command's key or trust does not open: no way back could be
    proved. One that does not answer is no reason, since a rollback may start it."""
    try:
        service.read()
    except AccessError as error:
        raise CutoverError(Exit.UNREACHABLE, f"{error}; nothing was changed") from None
    except ServerError:
        pass


def _served(service: Service) -> tuple[VerifyMode | None, list[RankState]]:
    """Return the mode and the ranks that serve; None and none without the plugin. Raises ServerError and its kinds."""
    try:
        states = service.read()
    except PluginMissingError:
        return None, []
    return mode_of(states), ranks(states)
