"""Entry point of the group ``sglang.srt.plugins``: registers the attention backend ``treeverify``.

SGLang runs ``activate`` in each of its processes and only logs what it raises. A failure is therefore kept and raised
by the factory, which SGLang calls when it builds the model's attention and where an exception stops the server.
"""

from __future__ import annotations

from typing import Any

from treeverify.env import VerifyMode, verify_mode
from treeverify.errors import ConfigError

_failure: Exception | None = None


def activate() -> None:
    """Register the backend and its name on the command line; touches no device and loads no kernel."""
    global _failure
    from treeverify.integrations.sglang import compat

    _failure = None
    try:
        compat.check_registration()
    except ConfigError as error:
        _failure = error
    compat.register(create)


def create(runner: Any) -> Any:
    """Build the backend of one model runner: ours for the target in mode validate or on, else SGLang's Triton.

    Raises ``ConfigError`` for a failed registration, a name of SGLang that is not as expected, a bad
    ``KDTREE_VERIFY``, or a server set up for something that is not computed here; ``BuildError`` for a kernel that
    cannot be built.
    """
    if _failure is not None:
        raise _failure
    mode = verify_mode()
    from treeverify.integrations.sglang import compat, probe
    from treeverify.integrations.sglang.attention import Verifier, extend

    compat.check()
    compat.install_hooks(probe.report)
    if mode is VerifyMode.OFF or compat.is_draft(runner):
        return compat.stock_backend(runner)
    backend = extend(compat.stock_class())(runner)
    refused = list(compat.refusals(backend, runner))
    if refused:
        raise ConfigError(
            f"KDTREE_VERIFY={mode.value}: this server cannot be served by treeverify: {'; '.join(refused)}. "
            "Unset KDTREE_VERIFY, or use --attention-backend triton"
        )
    backend.verifier = Verifier(mode, compat.facts(backend, runner), compat.kv_dtype(backend))
    probe.add(backend.verifier)
    return backend
