"""A request's body: read up to a limit, then parsed and checked off the event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from treeverify.errors import ConfigError
from treeverify.serve.errors import TooLargeError
from treeverify.serve.protocol import refusal

LIMIT = 8 * 2**20
"""Bytes of the largest body that is taken."""
Model = TypeVar("Model", bound=BaseModel)


async def read(request: Request, model: type[Model]) -> Model:
    """The body as a ``model``; ConfigError for what is not one, TooLargeError above ``LIMIT``."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= LIMIT:  # the rest is read and dropped: a client that still sends would not see the answer
            parts.append(part)
    if size > LIMIT:
        raise TooLargeError(f"body: expected at most {LIMIT} bytes, got {size}")
    return await asyncio.to_thread(_parse, b"".join(parts), model)


def _parse(raw: bytes, model: type[Model]) -> Model:
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ConfigError(f"body: expected UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"body: expected JSON: {error}") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details: list[Any] = error.errors()
        raise ConfigError(refusal(details)) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
