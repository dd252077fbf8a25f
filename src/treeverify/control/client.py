"""Reads and switches the mode of a live server: SGLang with the plugin, or ``treeverify serve``.

Every answer is checked; what cannot be trusted is a typed error that says what was asked and what came.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from treeverify.control.http import TIMEOUT_S, Connection, excerpt
from treeverify.control.schema import PluginState, RankState
from treeverify.control.wire import ERROR_KEY, MODE_KEY, MODE_NUMBERS, STATE_KEY
from treeverify.env import VerifyMode
from treeverify.errors import PluginMissingError, ServerError, SwitchError

SETTLE_S = 5.0
"""How long after an accepted switch every rank must say the new mode."""
_PAUSE_S = 0.2


def read_state(url: str, *, api_key: str | None = None, timeout: float = TIMEOUT_S) -> list[PluginState]:
    """Ask the server at ``url`` (``http://HOST:PORT``) what it serves: one state per data-parallel group.

    ``api_key`` goes out as a bearer token; None: ``TREEVERIFY_API_KEY``.

    Raises ``ServerUnreachableError`` (nothing answers, or not within ``timeout`` seconds), ``AccessError`` (its key or
    its certificate), ``PluginMissingError`` (a group says nothing of treeverify), ``ServerError`` (not such a server,
    or a field that the schema does not have).
    """
    where = f"{url.rstrip('/')}/server_info"
    answer = _ask(url, api_key, timeout, "GET", "/server_info")
    states = answer.get("internal_states") if isinstance(answer, dict) else None
    if not isinstance(states, list) or not states:
        raise ServerError(f"{where}: expected a list internal_states, as SGLang has: this is another kind of server")
    return [_state(where, group, entry) for group, entry in enumerate(states)]


def switch_mode(
    url: str, mode: VerifyMode, *, api_key: str | None = None, timeout: float = TIMEOUT_S
) -> list[PluginState]:
    """Switch every rank of the server at ``url`` to ``mode`` and return the state in which all of them have it.

    Raises ``SwitchError`` if the mode is not among those that the server allows, if it refuses, or if a rank does not
    say the new mode ``SETTLE_S`` seconds later; else as ``read_state``.
    """
    for group, rank in _ranks(read_state(url, api_key=api_key, timeout=timeout)):
        if mode not in rank.allowed:
            allowed = ", ".join(rank.allowed)
            raise SwitchError(
                f"{url}: group {group}, rank {rank.rank} allows {allowed} (KDTREE_VERIFY_ALLOW), not {mode}"
            )
    where = f"{url.rstrip('/')}/set_internal_state"
    body = {"server_args": {MODE_KEY: MODE_NUMBERS[mode]}}
    answer = _ask(url, api_key, timeout, "POST", "/set_internal_state", body)
    if not isinstance(answer, list) or not answer or any(updated is not True for updated in answer):
        raise SwitchError(f"{where}: expected true for each group, got {_excerpt(answer)}; the server's log says why")
    deadline = time.monotonic() + SETTLE_S
    while True:
        states = read_state(url, api_key=api_key, timeout=timeout)
        others = [f"group {g}, rank {r.rank}: {r.mode}" for g, r in _ranks(states) if r.mode is not mode]
        if not others:
            return states
        if time.monotonic() > deadline:
            raise SwitchError(f"{url}: switched to {mode}, but {SETTLE_S:.0f} s later {'; '.join(others)}")
        time.sleep(_PAUSE_S)


def _ranks(states: list[PluginState]) -> Iterator[tuple[int, RankState]]:
    for group, state in enumerate(states):
        for rank in state.ranks:
            yield group, rank


def require_healthy(url: str, *, api_key: str | None = None, timeout: float = TIMEOUT_S) -> None:
    """Raise, as ``read_state`` does, unless the server at ``url`` answers its health call with status 200."""
    with Connection(url, api_key=api_key, timeout=timeout) as server:
        server.fetch("GET", "/health")


def _ask(url: str, api_key: str | None, timeout: float, method: str, path: str, body: object = None) -> Any:
    """Return the JSON that the server answers."""
    with Connection(url, api_key=api_key, timeout=timeout) as server:
        response = server.fetch(method, path, body)
    try:
        return response.json()
    except ValueError as error:
        raise ServerError(f"{url.rstrip('/')}{path}: expected JSON, got {excerpt(response.text)}") from error


def _state(where: str, group: int, entry: object) -> PluginState:
    place = f"internal_states[{group}].{STATE_KEY}"
    if not isinstance(entry, dict) or STATE_KEY not in entry:
        raise PluginMissingError(
            f"{where}: no {place}: the plugin is not loaded; start the server with --attention-backend treeverify"
        )
    said = entry[STATE_KEY]
    if isinstance(said, dict) and set(said) == {ERROR_KEY}:
        raise ServerError(f"{where}: {place}: the server could not say its state: {_excerpt(said[ERROR_KEY])}")
    try:
        return PluginState.model_validate_json(json.dumps(said))
    except ValidationError as error:
        first = error.errors()[0]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        found = _excerpt(first["input"])
        message = f"{where}: {place}{field}: {first['msg']}; got {found}: another version of treeverify?"
        raise ServerError(message) from error


def _excerpt(value: object) -> str:
    return excerpt(value if isinstance(value, str) else json.dumps(value, default=str))
