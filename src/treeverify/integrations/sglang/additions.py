"""How something is added to SGLang's functions: each once, and what only observes never ends serving.

Everything that counts, exports or reports runs under ``attempt``. A report that raises is an entry that says why; the
server's own state and everybody else's entries are answered all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from treeverify.control.wire import ERROR_KEY
from treeverify.integrations.sglang.names import read

logger = logging.getLogger(__name__)
Stock = Callable[..., Any]


class Failed(NamedTuple):
    """What stands in for a result that could not be had."""

    reason: str


def attempt(make: Callable[[], Any]) -> Any:
    """Return ``make()``, or why it failed: neither serving nor the ranks that wait for this one must end with it."""
    try:
        return make()
    except Exception as error:
        logger.exception("treeverify: observing failed, serving goes on")
        return Failed(f"{type(error).__name__}: {error}")


def wrap(owner: Any, name: str, whose: str, wrapper: Callable[[Stock], Stock]) -> None:
    """Replace ``owner.name``, once for each ``whose``; the replacement keeps the signature, which is checked again."""
    stock, mark = read(owner, name), f"treeverify_{whose}"
    if not hasattr(stock, mark):
        wrapped = wraps(stock)(wrapper(stock))
        setattr(wrapped, mark, True)
        setattr(owner, name, wrapped)


def with_entry(stock: Stock, key: str, entry: Callable[[Any], object]) -> Stock:
    """``Scheduler.get_internal_state`` with ``entry(scheduler)``, plain values, under ``key`` of the info query."""

    def get_internal_state(scheduler: Any, recv_req: Any) -> Any:
        answer = stock(scheduler, recv_req)
        found = attempt(lambda: entry(scheduler))
        answer.internal_state[key] = {ERROR_KEY: found.reason} if isinstance(found, Failed) else found
        return answer

    return get_internal_state
