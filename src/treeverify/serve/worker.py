"""One thread that owns the engine. Everything else puts commands into its queue, which it takes between steps."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import treeverify
from treeverify.control.schema import PluginState, RankState
from treeverify.engine.engine import Engine
from treeverify.engine.request import Result, SamplingParams
from treeverify.env import VerifyMode
from treeverify.errors import TreeverifyError
from treeverify.serve.tally import Tally

log = logging.getLogger(__name__)
_Command = Callable[[], None]


class StoppedError(TreeverifyError):
    """The server is shutting down."""


class StepError(TreeverifyError):
    """The engine raised during a step; the requests that were running have no answer."""


class Worker:
    """Runs the engine's steps while there are requests, and sleeps otherwise.

    A step that raises ends every running request with that error; the engine goes on with the next ones.
    """

    def __init__(self, engine: Engine, tally: Tally, allowed: tuple[VerifyMode, ...]) -> None:
        """``allowed``: modes that a live switch may choose."""
        self.failed_steps = 0
        self._engine, self._tally, self._allowed = engine, tally, allowed
        self._switches, self._switched_at = 0, -1
        self._waiting: dict[int, Future[Result]] = {}
        self._queue: SimpleQueue[tuple[_Command, Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        engine.observe_verify(tally)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End running requests with StoppedError, then the thread; returns when it has ended."""
        self._stopping = True
        self._queue.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """True while requests can be answered."""
        return self._thread.is_alive() and not self._stopping

    def generate(self, prompt: list[int], params: SamplingParams, **options: Any) -> Future[Result]:
        """Queue a request; ``options`` are those of ``Engine.submit``. The future fails with what the engine raises."""
        answer: Future[Result] = Future()

        def submit() -> None:
            try:
                self._waiting[self._engine.submit(prompt, params, **options)] = answer
            except TreeverifyError as error:
                answer.set_exception(error)

        self._put(submit, answer)
        return answer

    def switch(self, mode: VerifyMode) -> Future[bool]:
        """Change the mode between two steps; False, and nothing changed, for one that is not allowed."""
        answer: Future[bool] = Future()

        def change() -> None:
            if mode not in self._allowed:
                allowed = ", ".join(self._allowed)
                log.warning("mode %s refused: KDTREE_VERIFY_ALLOW allows %s", mode.value, allowed)
                answer.set_result(False)
                return
            if mode is not self._engine.verify_mode:
                self._switches += 1
                self._switched_at = self._engine.metrics.steps
                self._engine.set_verify_mode(mode)
                log.warning("mode %s from step %d on", mode.value, self._switched_at)
            answer.set_result(True)

        self._put(change, answer)
        return answer

    def state(self) -> Future[PluginState]:
        """What the server says of its verify attention, read between two steps."""
        answer: Future[PluginState] = Future()
        self._put(lambda: answer.set_result(self._state()), answer)
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
        if not self.alive:
            answer.set_exception(StoppedError("the server is shutting down"))
        else:
            self._queue.put((command, answer))

    def _run(self) -> None:
        while True:
            while not self._queue.empty() or not self._engine.busy:
                item = self._queue.get()
                if item is None:
                    self._end_all(StoppedError("the server is shutting down"))
                    return
                command, answer = item
                if answer.set_running_or_notify_cancel():  # from here on the client cannot cancel it
                    command()
            self._step()

    def _step(self) -> None:
        try:
            ended = [output.request_id for output in self._engine.step() if output.finish is not None]
        except Exception as error:
            log.exception("a step failed; its requests end with this error")
            self.failed_steps += 1
            self._end_all(StepError(f"a step failed: {type(error).__name__}: {error}"))
            return
        for request in ended:
            self._waiting.pop(request).set_result(self._engine.result(request))

    def _end_all(self, error: Exception) -> None:
        for request, answer in self._waiting.items():
            self._engine.abort(request)
            self._engine.result(request)
            answer.set_exception(error)
        self._waiting.clear()
