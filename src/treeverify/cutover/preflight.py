"""Everything that can be found wrong before anything is touched."""

from __future__ import annotations

from treeverify.cutover import files
from treeverify.cutover.exits import Exit
from treeverify.cutover.plan import ALLOW, MODE, NEEDS_LOGPROBS, Before, CutoverPlan, why_restart
from treeverify.cutover.runner import Runner
from treeverify.cutover.service import Service, mode_of, ranks
from treeverify.env import VerifyMode
from treeverify.errors import CutoverError, PluginMissingError, ServerError


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
    owned = {str(path): files.read(path) for path in runner.contents({})}
    environment = runner.next_start()
    try:
        states = service.read()
        mode, serving = mode_of(states), ranks(states)
    except PluginMissingError:
        states, mode, serving = [], None, []
        if not service.healthy():
            raise CutoverError(Exit.UNREACHABLE, f"{url}: answers, but its health call does not") from None
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


def require_logprobs(plan: CutoverPlan, service: Service) -> None:
    """Raise CutoverError where the gates of ``plan`` need log-probabilities and the server refuses them."""
    if plan.target is VerifyMode.OFF or not plan.prompts.logprobs:
        return
    try:
        refusal = service.refuses_logprobs(plan.prompts)
    except ServerError as error:
        raise CutoverError(Exit.UNREACHABLE, str(error)) from None
    if refusal is not None:
        raise CutoverError(
            Exit.NO_LOGPROBS,
            f"the server at {plan.url} gives no log-probabilities ({refusal}); nothing was changed. "
            f"--without-logprobs goes on and leaves {', '.join(NEEDS_LOGPROBS)} and texts that part not judged",
        )
