"""The HTTP side: SGLang's routes that a client, the probe and the cutover use, over one engine thread."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

import treeverify
from treeverify.control.wire import MODE_KEY, MODE_NUMBERS, STATE_KEY
from treeverify.errors import ConfigError, TreeverifyError
from treeverify.models.tokenizer import Tokenizer
from treeverify.serve.answer import answer
from treeverify.serve.metrics import Requests
from treeverify.serve.protocol import GenerateRequest, SetState, refusal
from treeverify.serve.worker import StepError, StoppedError, Worker


@dataclass(frozen=True)
class Served:
    """What the routes need: the worker, the model's tokenizer and names, and how every request drafts."""

    worker: Worker
    tokenizer: Tokenizer | None
    eos: tuple[int, ...]
    model: str
    draft: str
    budget: int | None


def build(served: Served) -> FastAPI:
    """Build the application; its lifespan starts and stops the worker."""
    requests = Requests()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        served.worker.start()
        yield
        await asyncio.to_thread(served.worker.stop)

    app = FastAPI(title="treeverify", version=treeverify.__version__, lifespan=lifespan, openapi_url=None)
    _add_errors(app, requests)

    @app.post("/generate")
    async def generate(body: GenerateRequest) -> JSONResponse:
        body.check()
        prompt = body.input_ids if body.input_ids is not None else _tokenizer(served).encode(body.text or "")
        began = perf_counter()
        result = await asyncio.wrap_future(
            served.worker.generate(
                prompt,
                body.sampling_params.engine_params(served.eos),
                draft=served.draft,
                budget=served.budget,
                top_logprobs=body.top_logprobs_num if body.return_logprob else None,
            )
        )
        seconds = perf_counter() - began
        requests.done(len(result.tokens), seconds)
        text = None if served.tokenizer is None else served.tokenizer.decode(result.tokens)
        return JSONResponse(answer(result, text, len(prompt), body.rid or uuid.uuid4().hex, seconds))

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if served.worker.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        state = await asyncio.wrap_future(served.worker.state())
        return Response(requests.exposition(state), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        state = await asyncio.wrap_future(served.worker.state())
        return {
            "model_path": served.model,
            "version": f"embedded {treeverify.__version__}",
            "internal_states": [{STATE_KEY: state.model_dump(mode="json")}],
        }

    @app.api_route("/set_internal_state", methods=["POST", "PUT"])
    async def set_internal_state(body: SetState) -> list[bool]:
        return [await asyncio.wrap_future(served.worker.switch(_mode(body.server_args)))]

    return app


def _mode(server_args: dict[str, int | float]) -> Any:
    if unknown := [key for key in server_args if key != MODE_KEY]:
        raise ConfigError(f"server_args: expected {MODE_KEY} only, got {unknown[0]}")
    modes = {number: mode for mode, number in MODE_NUMBERS.items()}
    number = server_args.get(MODE_KEY)
    if number not in modes:
        named = ", ".join(f"{number} ({mode.value})" for number, mode in modes.items())
        raise ConfigError(f"server_args.{MODE_KEY}: expected one of {named}; got {number}")
    return modes[int(number)]


def _tokenizer(served: Served) -> Tokenizer:
    if served.tokenizer is None:
        raise ConfigError("text: this model's folder has no tokenizer.json; send input_ids")
    return served.tokenizer


def _add_errors(app: FastAPI, requests: Requests) -> None:
    """Every refusal and failure as one line, ``{"error": {"message": ...}}``: 400, 500 or 503."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _error(400, refusal(list(error.errors())))

    @app.exception_handler(TreeverifyError)
    async def refused(request: Request, error: TreeverifyError) -> JSONResponse:
        if isinstance(error, StoppedError):
            return _error(503, str(error))
        if isinstance(error, StepError):
            requests.failed()
            return _error(500, str(error))
        return _error(400, str(error))

    def _error(status: int, message: str) -> JSONResponse:
        return JSONResponse({"error": {"message": " ".join(message.split())}}, status_code=status)
