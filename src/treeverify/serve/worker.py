"""One thread that owns the engine. Everything else puts commands into its queue, which it takes between steps."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import treeverify
from treeverify.control.schema import PluginState, RankState
from treeverify.engine.engine import Engine
from treeverify.engine.request import Output, Result, SamplingParams, TokenLogprob
from treeverify.env import VerifyMode
from treeverify.errors import TreeverifyError
from treeverify.serve.errors import StepError, StoppedError
from treeverify.serve.tally import Tally

log = logging.getLogger(__name__)
_Command = Callable[[], None]
T = TypeVar("T")


Listener = Callable[[list[int], list[TokenLogprob]], None]
"""Told on the worker's thread of the new tokens of each step but the last, and their log-probabilities if asked for."""


@dataclass(frozen=True)
class _Waiting:
    """Who waits for a request of the engine."""

    answer: Future[Result]
    listen: Listener | None


class Worker:
    """Runs the engine's steps while there are requests, and sleeps otherwise.

    A step that raises ends every running request with that error; the engine goes on with the next ones. A request
    whose future is cancelled is aborted between two steps, as commands are.
    """

    def __init__(self, engine: Engine, tally: Tally, allowed: tuple[VerifyMode, ...]) -> None:
        """``allowed``: modes that a live switch may choose."""
        self.failed_steps = 0
        self._engine, self._tally, self._allowed = engine, tally, allowed
        self._switches, self._switched_at = 0, -1
        self._waiting: dict[int, _Waiting] = {}
        self._queue: SimpleQueue[tuple[_Command, Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping, self._lock = False, threading.Lock()
        engine.observe_verify(tally)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """From the next step on, end every request with StoppedError, then the thread. May be called again."""
        with self._lock:
            self._stopping = True
            self._queue.put(None)

    def stop(self) -> None:
        """``end``, and return when the thread has ended."""
        self.end()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """True while requests can be answered."""
        return self._thread.is_alive() and not self._stopping

    def generate(
        self, prompt: list[int], params: SamplingParams, *, listen: Listener | None = None, **options: Any
    ) -> Future[Result]:
        """Queue a request; ``options`` are those of ``Engine.submit``. The future fails with what the engine raises.

        Cancelling the future, which can be done until it has a result, aborts the request.
        """
        answer: Future[Result] = Future()

        def submit() -> None:
            if not answer.cancelled():
                self._waiting[self._engine.submit(prompt, params, **options)] = _Waiting(answer, listen)

        def leave() -> None:
            for request in [request for request, waiting in self._waiting.items() if waiting.answer is answer]:
                self._drop(request)

        self._put(submit, answer)
        answer.add_done_callback(lambda _: self._put(leave, Future()) if answer.cancelled() else None)
        return answer

    def switch(self, mode: VerifyMode) -> Future[bool]:
        """Change the mode between two steps; False, and nothing changed, for one that is not allowed."""
        answer: Future[bool] = Future()

        def change() -> None:
            if mode not in self._allowed:
                allowed = ", ".join(self._allowed)
                log.warning("mode %s refused: KDTREE_VERIFY_ALLOW allows %s", mode.value, allowed)
                _settle(answer, False)
                return
            if mode is not self._engine.verify_mode:
                self._switches += 1
                self._switched_at = self._engine.metrics.steps
                self._engine.set_verify_mode(mode)
                log.warning("mode %s from step %d on", mode.value, self._switched_at)
            _settle(answer, True)

        self._put(change, answer)
        return answer

    def state(self) -> Future[PluginState]:
        """What the server says of its verify attention, read between two steps."""
        answer: Future[PluginState] = Future()
        self._put(lambda: _settle(answer, self._state()), answer)
        return answer

    def _state(self) -> PluginState:
        rank = RankState(
            rank=0,
            pid=os.getpid(),
            mode=self._engine.verify_mode,
            allowed=list(self._allowed),
            switches=self._switches,
            switched_at=self._switched_at,
            backends=[self._tally.state()],
        )
        return PluginState(version=treeverify.__version__, engine="embedded", ranks=[rank])

    def _put(self, command: _Command, answer: Future[Any]) -> None:
        with self._lock:  # so that nothing is queued behind the end
            if self.alive:
                self._queue.put((command, answer))
                return
        _fail(answer, StoppedError("the server is shutting down"))

    def _run(self) -> None:
        while True:
            while not self._queue.empty() or not self._engine.busy:
                item = self._queue.get()
                if item is None:
                    self._end_all(StoppedError("the server is shutting down"))
                    return
                command, answer = item
                try:
                    command()
                except TreeverifyError as error:
                    _fail(answer, error)
                except Exception as error:
                    log.exception("a request could not be taken")
                    _fail(answer, error)
            self._step()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            log.exception("a step failed; its requests end with this error")
            self.failed_steps += 1
            self._end_all(StepError(f"a step failed: {type(error).__name__}: {error}"))
            return
        for output in outputs:
            self._tell(output)

    def _tell(self, output: Output) -> None:
        waiting = self._waiting[output.request_id]
        if output.finish is not None:
            del self._waiting[output.request_id]
            _settle(waiting.answer, self._engine.result(output.request_id))
        elif waiting.listen is not None:
            waiting.listen(output.tokens, output.logprobs)

    def _end_all(self, error: Exception) -> None:
        for request in list(self._waiting):
            _fail(self._drop(request).answer, error)

    def _drop(self, request: int) -> _Waiting:
        self._engine.abort(request)
        self._engine.result(request)
        return self._waiting.pop(request)


def _settle(answer: Future[T], value: T) -> None:
    """Give the answer, unless nobody waits for it any longer."""
    if answer.set_running_or_notify_cancel():
        answer.set_result(value)


def _fail(answer: Future[Any], error: Exception) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)
