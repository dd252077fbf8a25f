"""Entry point of the group ``sglang.srt.plugins``: registers the attention backend ``treeverify``.

SGLang runs ``activate`` in each of its processes and only logs what it raises. A failure is therefore kept and raised
by the factory, which SGLang calls when it builds the model's attention and where an exception stops the server.
"""

from __future__ import annotations

import logging
from typing import Any

from treeverify.env import refuse_fault
from treeverify.errors import ConfigError

logger = logging.getLogger(__name__)
_failure: Exception | None = None


def activate() -> None:
    """Register the backend and its name on the command line; touches no device and loads no kernel."""
    global _failure
    from treeverify.integrations.sglang import compat
    from treeverify.integrations.sglang.ddtree import plugin as ddtree

    _failure = None
    try:
        compat.check_registration()
    except ConfigError as error:
        _failure = error
    compat.register(create)
    ddtree.register()


def create(runner: Any) -> Any:
    """Build the backend of one model runner: SGLang's Triton for a draft, or where ``off`` is all that is allowed.

    Raises ``ConfigError`` for a failed registration, a name of SGLang that is not as expected, a bad
    ``KDTREE_VERIFY`` or ``KDTREE_VERIFY_ALLOW``, or a server set up for something that is not served here;
    ``BuildError`` for a kernel that cannot be built.
    """
    if _failure is not None:
        raise _failure
    refuse_fault("an SGLang server")
    from treeverify.integrations.sglang import compat, hooks, modes, probe

    switch = modes.current()
    compat.check()
    hooks.install(hooks.Providers(probe.rank, probe.server, create_draft, probe.step))
    probe.observe(*compat.place(runner), compat.metrics_enabled())
    if switch.stock or compat.is_draft(runner):
        return compat.stock_backend(runner)
    backend, refused = _build(runner, draft=False)
    if refused:
        allowed = ",".join(switch.allowed)
        raise ConfigError(
            f"KDTREE_VERIFY={switch.start.value}, modes allowed: {allowed}: this server cannot be served by "
            f"treeverify: {'; '.join(refused)}. Unset both variables, or use --attention-backend triton"
        )
    return backend


def create_draft(runner: Any) -> Any:
    """Build the backend for a draft model's extend calls; None if Triton keeps them, which is logged with reasons."""
    from treeverify.integrations.sglang import modes

    if modes.current().stock:
        return None
    backend, refused = _build(runner, draft=True)
    if refused:
        logger.warning("treeverify: the draft stays with Triton: %s", "; ".join(refused))
        return None
    return backend


def _build(runner: Any, draft: bool) -> tuple[Any, list[str]]:
    """Return a backend and no refusals, or the refusals."""
    from treeverify.env import VerifyMode
    from treeverify.integrations.sglang import compat, dump, modes, names, probe
    from treeverify.integrations.sglang.attention import Verifier
    from treeverify.integrations.sglang.backend import extend

    switch = modes.current()
    backend = extend(compat.stock_class())(runner)
    refused = list(compat.refusals(backend, runner, switched=len(switch.allowed) > 1))
    if not refused:
        facts, dtype, dumper = compat.facts(backend, runner), compat.kv_dtype(backend), None
        if VerifyMode.VALIDATE in switch.allowed:
            group, rank = compat.place(runner)
            label = f"dp{group}-tp{rank}-draft" if draft else f"dp{group}-tp{rank}"
            sizes = dump.Sizes(facts.nodes, facts.heads, facts.max_prefix, dtype, facts.device)
            dumper = dump.from_environment(label, sizes, {"engine": f"sglang {names.version()}"})
        backend.draft = draft
        backend.verifier = Verifier(switch, facts, dtype, dumper)
        probe.add(backend.verifier)
    return backend, refused
