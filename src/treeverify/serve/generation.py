"""One request at the engine, followed from the event loop: to its end, by pieces, or until its client leaves."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from treeverify.engine.request import Result, TokenLogprob
from treeverify.errors import TreeverifyError
from treeverify.models.tokenizer import StreamDecoder, Tokenizer
from treeverify.serve.answer import Asked, answer, piece
from treeverify.serve.errors import StepError, error_body
from treeverify.serve.metrics import Requests
from treeverify.serve.protocol import GenerateRequest
from treeverify.serve.worker import Worker

T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """What the routes need: the worker, the model's tokenizer and names, and how every request drafts."""

    worker: Worker
    tokenizer: Tokenizer | None
    eos: tuple[int, ...]
    model: str
    draft: str
    budget: int | None


class Generation:
    """A request under way. ``close`` it when nobody waits for it: what has not ended is then aborted."""

    def __init__(self, served: Served, requests: Requests, body: GenerateRequest, prompt: list[int]) -> None:
        """Hand the request to the worker; ConfigError for a parameter out of range."""
        loop = asyncio.get_running_loop()
        self._tokenizer, self._requests = served.tokenizer, requests
        self._asked = Asked(body.rid or uuid.uuid4().hex, len(prompt))
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._news = asyncio.Event()
        self._began, self._seconds = perf_counter(), 0.0

        def listen(tokens: list[int], logprobs: list[TokenLogprob]) -> None:
            loop.call_soon_threadsafe(self._take, tokens, logprobs)

        future = served.worker.generate(
            prompt,
            body.sampling_params.engine_params(served.eos),
            listen=listen if body.stream else None,
            draft=served.draft,
            budget=served.budget,
            top_logprobs=body.top_logprobs_num if body.return_logprob else None,
        )
        self._result: asyncio.Future[Result] = asyncio.wrap_future(future)
        self._result.add_done_callback(self._end)

    def close(self) -> None:
        """Abort the request unless it has ended."""
        self._result.cancel()

    async def whole(self) -> dict[str, Any]:
        """The answer, once the request has ended; raises what the worker raised."""
        result = await self._result
        text = None if self._tokenizer is None else self._tokenizer.decode(result.tokens)
        return answer(self._asked, result, text, self._seconds)

    async def begun(self) -> None:
        """Return when there is something to stream; raises what the worker raised instead."""
        await self._news.wait()
        if self._result.done():
            self._result.result()

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """All that there is so far, each time that there is more, and the whole answer last."""
        decoder = None if self._tokenizer is None else StreamDecoder(self._tokenizer)
        text, told = None if decoder is None else "", 0
        while True:
            await self._news.wait()
            self._news.clear()
            if self._result.done():
                yield await self.whole()
                return
            if decoder is not None and text is not None:
                text += decoder.feed(self._tokens[told:])
            told = len(self._tokens)
            yield piece(self._asked, self._tokens, self._logprobs, text)

    def _take(self, tokens: list[int], logprobs: list[TokenLogprob]) -> None:
        self._tokens += tokens
        self._logprobs += logprobs
        self._news.set()

    def _end(self, result: asyncio.Future[Result]) -> None:
        self._seconds = perf_counter() - self._began
        if result.cancelled():
            self._requests.aborted()
        elif (error := result.exception()) is None:
            self._requests.done(len(result.result().tokens), self._seconds)
        elif isinstance(error, StepError):
            self._requests.failed()
        self._news.set()


class EventStream(StreamingResponse):
    """A generation as SGLang streams it: server-sent events, each with all the text so far, then ``[DONE]``."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation) -> None:
        """Takes the generation over: it is closed when the stream ends, at its end or since the client left."""
        super().__init__(_events(generation))
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; ClientDisconnect, and ``work`` is cancelled, once the client of ``request`` has left."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(generation: Generation) -> AsyncIterator[str]:
    try:
        async for found in generation.pieces():
            yield _event(json.dumps(found))
    except TreeverifyError as error:
        yield _event(json.dumps(error_body(str(error))))
    yield _event("[DONE]")


def _event(data: str) -> str:
    return f"data: {data}\n\n"
