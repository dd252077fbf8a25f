"""Every refusal and failure that the server answers, in one shape: ``{"error": {"message": ...}}``, one line."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treeverify.errors import TreeverifyError
from treeverify.text import escaped

log = logging.getLogger(__name__)
_LONGEST = 1000
_CLIENT_LEFT = 499
"""Never sent; stands for an answer that nobody waits for."""


class StoppedError(TreeverifyError):
    """The server is shutting down."""


class StepError(TreeverifyError):
    """The engine raised during a step; the requests that were running have no answer."""


class TooLargeError(TreeverifyError):
    """A request's body is larger than the server takes."""


_STATUS: dict[type[TreeverifyError], int] = {StoppedError: 503, StepError: 500, TooLargeError: 413}


def error_body(message: str) -> dict[str, Any]:
    """The shape. What JSON in UTF-8 cannot hold is escaped, and what is very long is cut."""
    line = escaped(" ".join(message.split()))
    return {"error": {"message": line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."}}


def add_errors(app: FastAPI) -> None:
    """Give ``app`` this shape for all that can go wrong; a fault of the client's leaves no traceback in the log."""

    @app.exception_handler(TreeverifyError)
    async def refused(request: Request, error: TreeverifyError) -> Response:
        return JSONResponse(error_body(str(error)), _STATUS.get(type(error), 400))

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        line = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(line), error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body(f"unexpected {type(error).__name__}: {error}; the log has more"), 500)

    app.add_middleware(_CutOff)


class _CutOff:
    """Answers 503 where uvicorn cancels a request, since its client did not send or read for too long at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            log.warning("%s %s: cut off, the server is shutting down", scope["method"], scope["path"])
            if not started:
                await JSONResponse(error_body("the server is shutting down"), 503)(scope, receive, send)
