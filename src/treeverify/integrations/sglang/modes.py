"""The mode of this process, and the live switch of it.

One ``Switch`` per process, made from the environment where SGLang first builds an attention backend. All ranks of a
server are told of a switch by the same control request, which SGLang hands out between the same two steps; the hook
(``hooks``) lets them agree before one of them changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from treeverify.control.wire import MODE_KEY, MODE_NUMBERS
from treeverify.env import VerifyMode, allowed_modes, verify_mode
from treeverify.errors import ConfigError

logger = logging.getLogger(__name__)


class Switch:
    """The current mode, those that it may change to, and what was switched so far."""

    def __init__(self, start: VerifyMode, allowed: tuple[VerifyMode, ...]) -> None:
        self.mode = start
        self.start = start
        self.allowed = allowed
        self.switches = 0
        self.switched_at = -1
        """SGLang's count of forward passes when the last switch took effect; -1: none yet."""
        self._asked: list[object] | None = None

    @property
    def stock(self) -> bool:
        """Whether ours never serves nor compares in this process."""
        return self.allowed == (VerifyMode.OFF,)

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured or warmed up for a mode."""
        return self._asked is not None

    def ask(self, who: object) -> VerifyMode:
        """Return the mode for a call that ``who`` is about to serve."""
        if self._asked is not None and who not in self._asked:
            self._asked.append(who)
        return self.mode

    @contextmanager
    def capture(self, mode: VerifyMode) -> Iterator[list[object]]:
        """Let ``mode`` be the current one meanwhile; yields those who ask for it: the graph depends on the mode."""
        before, self.mode, self._asked = self.mode, mode, []
        try:
            yield self._asked
        finally:
            self.mode, self._asked = before, None

    def requested(self, values: Mapping[str, float]) -> VerifyMode:
        """Return the mode that a control request asks for; raises ``ConfigError`` if it may not have it."""
        if set(values) != {MODE_KEY}:
            others = ", ".join(sorted(set(values) - {MODE_KEY}))
            raise ConfigError(f"{MODE_KEY}: expected alone in its request, got it with {others}")
        number = values[MODE_KEY]
        mode = next((mode for mode, known in MODE_NUMBERS.items() if known == number), None)
        if mode is None:
            numbers = ", ".join(f"{known} {mode.value}" for mode, known in MODE_NUMBERS.items())
            raise ConfigError(f"{MODE_KEY}: expected one of {numbers}; got {number}")
        if mode not in self.allowed:
            allowed = ", ".join(self.allowed)
            raise ConfigError(f"{MODE_KEY}: expected one of {allowed} (KDTREE_VERIFY_ALLOW); got {mode.value}")
        return mode

    def change(self, mode: VerifyMode, step: int) -> None:
        """Serve ``mode`` from the next forward pass on; ``step`` is the number of those so far."""
        logger.info("treeverify: mode %s -> %s after forward pass %d", self.mode.value, mode.value, step)
        self.mode = mode
        self.switches += 1
        self.switched_at = step


_current: Switch | None = None


def current() -> Switch:
    """Return the switch of this process; the first call reads the environment and raises ``ConfigError``."""
    global _current
    if _current is None:
        _current = Switch(verify_mode(), allowed_modes())
    return _current
