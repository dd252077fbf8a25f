"""The HTTP side: SGLang's routes that a client, the probe and the cutover use, over one engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

import treeverify
from treeverify.control.wire import MODE_KEY, MODE_NUMBERS, STATE_KEY
from treeverify.errors import ConfigError
from treeverify.serve.body import read
from treeverify.serve.errors import StoppedError, add_errors
from treeverify.serve.generation import EventStream, Generation, Served, unless_gone
from treeverify.serve.metrics import CONTENT_TYPE, Requests
from treeverify.serve.protocol import GenerateRequest, SetState


def build(served: Served) -> FastAPI:
    """Build the application; its lifespan starts and stops the worker."""
    requests = Requests()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        served.worker.start()
        yield
        await asyncio.to_thread(served.worker.stop)

    app = FastAPI(
        title="treeverify",
        version=treeverify.__version__,
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
    )
    add_errors(app)

    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        body = await read(request, GenerateRequest)
        body.check()
        generation = Generation(served, requests, body, await _ids(served, body.prompt))
        try:
            if not body.stream:
                return JSONResponse(await unless_gone(request, generation.whole()))
            await unless_gone(request, generation.begun())  # a refusal has its status, since no event is sent yet
        except BaseException:
            generation.close()
            raise
        return EventStream(generation)

    @app.get("/health")
    async def health() -> Response:
        if not served.worker.alive:
            raise StoppedError("the server is shutting down")
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        state = await asyncio.wrap_future(served.worker.state())
        return Response(requests.exposition(state), media_type=CONTENT_TYPE)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        state = await asyncio.wrap_future(served.worker.state())
        return {
            "model_path": served.model,
            "version": f"embedded {treeverify.__version__}",
            "internal_states": [{STATE_KEY: state.model_dump(mode="json")}],
        }

    @app.api_route("/set_internal_state", methods=["POST", "PUT"])
    async def set_internal_state(request: Request) -> list[bool]:
        body = await read(request, SetState)
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


async def _ids(served: Served, prompt: str | list[int]) -> list[int]:
    """The prompt's ids; a text is cut into tokens beside the event loop, since a large one takes seconds."""
    if not isinstance(prompt, str):
        return prompt
    if served.tokenizer is None:
        raise ConfigError("text: this model's folder has no tokenizer.json; send input_ids")
    return await asyncio.to_thread(served.tokenizer.encode, prompt)
