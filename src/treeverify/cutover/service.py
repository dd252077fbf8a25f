"""The live server, as the cutover sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from treeverify.control import client
from treeverify.control.schema import PluginState, RankState
from treeverify.cutover.samples import Plan
from treeverify.env import VerifyMode
from treeverify.errors import SwitchError


class Service(Protocol):
    """A server that can be asked for its state and switched."""

    def read(self) -> list[PluginState]:
        """Return the state, one entry per data-parallel group; raises ServerError and its kinds."""

    def switch(self, mode: VerifyMode) -> list[PluginState]:
        """Return the state in which every rank has ``mode``; raises ServerError and its kinds."""

    def require_healthy(self) -> None:
        """Raise ServerError or one of its kinds unless it answers its health call."""

    def refuses_logprobs(self, plan: Plan) -> str | None:
        """Put a request of ``plan``; return what it says to one for log-probabilities, None if it gives them or none
        are wanted. Raises ServerError and its kinds."""


class LiveService:
    """The server at ``url``."""

    def __init__(self, url: str) -> None:
        self._url = url

    def read(self) -> list[PluginState]:
        """See ``Service``."""
        return client.read_state(self._url)

    def switch(self, mode: VerifyMode) -> list[PluginState]:
        """See ``Service``."""
        return client.switch_mode(self._url, mode)

    def require_healthy(self) -> None:
        """See ``Service``."""
        client.require_healthy(self._url)

    def refuses_logprobs(self, plan: Plan) -> str | None:
        """See ``Service``."""
        from treeverify.cutover.asking import refuses_logprobs

        return refuses_logprobs(self._url, plan)


def ranks(states: Sequence[PluginState]) -> list[RankState]:
    """Return all ranks of all groups."""
    return [rank for state in states for rank in state.ranks]


def processes(states: Sequence[PluginState]) -> tuple[int, ...]:
    """Return the ids of the processes that serve, in order."""
    return tuple(sorted(rank.pid for rank in ranks(states)))


def mode_of(states: list[PluginState]) -> VerifyMode:
    """Return the mode that every rank has; raises SwitchError where they differ."""
    modes = {rank.mode for rank in ranks(states)}
    if len(modes) != 1:
        raise SwitchError(f"ranks are in different modes: {', '.join(sorted(modes))}")
    return modes.pop()
