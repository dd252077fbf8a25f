"""The embedded engine: submit, step, stream, abort. Single-threaded.

A callback inside a step (an observer, a drafter, a kernel) may submit, abort and change the mode, which holds from the
next step on; what would run a step itself is refused there with ContractError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from treeverify import env
from treeverify.engine.budget import WidthPolicy
from treeverify.engine.cache import Cache
from treeverify.engine.host import EngineHost
from treeverify.engine.metrics import Metrics
from treeverify.engine.protocols import Drafter, Target, Tokenizer
from treeverify.engine.request import (
    Budget,
    DraftMode,
    DraftOptions,
    Output,
    Request,
    Result,
    SamplingParams,
    check_int,
    checked_prompt,
)
from treeverify.engine.scheduler import Scheduler
from treeverify.engine.step import Stepper
from treeverify.engine.verify import Implementation, VerifyAttention, VerifyObserver, VerifyRecord, ours
from treeverify.env import VerifyMode
from treeverify.errors import CapacityError, ConfigError, ContractError
from treeverify.kvpool.pool import PoolAudit
from treeverify.step.randomness import fresh_seed


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and choices of an engine; ConfigError for a value that cannot be used.

    ``verify`` None reads KDTREE_VERIFY. ``implementation`` names what ``on`` and ``validate`` call ours (None: the
    device's first). ``max_batch`` counts running requests; ``prefill_chunk`` tokens are prefilled per step at most,
    and no more than 256, so that a chunk is a legal verify call on a GPU too.
    """

    slots: int = 8192
    max_batch: int = 16
    prefill_chunk: int = 256
    verify: VerifyMode | str | None = None
    implementation: str | None = None
    pool_seed: int = 0

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name, high in (("slots", None), ("max_batch", None), ("prefill_chunk", 256)):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or (high is not None and value > high):
                limit = ">= 1" if high is None else f"1..{high}"
                raise ConfigError(f"{name}: expected an integer {limit}, got {value!r}")


class Engine:
    """Generates text for many requests over one paged pool; output is plain decoding's, whatever the draft."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        mine: Implementation | None = None,
        policy: WidthPolicy | None = None,
    ) -> None:
        """Allocate the pool. Tests plant faults with ``mine``. Without a ``policy``, ``budget="auto"`` is refused."""
        if mine is None:
            env.refuse_fault("an engine that was given no faulty kernel")
        self.config = config or EngineConfig()
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.metrics = Metrics()
        self._cache = Cache(target, drafter, self.config.slots, self.config.pool_seed)
        mode = env.verify_mode() if self.config.verify is None else env.parse_verify_mode(self.config.verify)
        self._attention = VerifyAttention(mode, target.scale, mine or ours(self.config.implementation))
        self._stepper = Stepper(EngineHost(target, drafter, self._cache, self._attention, self.metrics), policy)
        self._scheduler = Scheduler(self.config.max_batch, self._cache.grow, self._cache.release)
        self._requests: dict[int, Request] = {}
        self._next_id, self._widest = 0, None if policy is None else policy.widest

    # -- what is asked ------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        draft: DraftMode | str = DraftMode.TREE,
        budget: Budget = None,
        top_logprobs: int | None = None,
    ) -> int:
        """Queue a request and return its id; it starts when it fits.

        ``budget``: draft nodes beside the root (default: 16 for a tree, the drafter's depth for a chain), or ``auto``.
        It is a limit: where slots are short, a step verifies fewer nodes, down to plain decoding.
        ``top_logprobs``: keep each new token's log-probability and those of so many likeliest ids (None: keep none).
        Raises ContractError (empty prompt, ids out of range), ConfigError (draft, budget, top_logprobs) or
        CapacityError (can never fit).
        """
        params = params or SamplingParams()
        if top_logprobs is not None:
            check_int("top_logprobs", top_logprobs, 0, self.target.vocab_size + 1)
        options = DraftOptions.of(draft, budget, self._widest)
        if options.mode is not DraftMode.NONE and self.drafter is None:
            raise ConfigError(f"draft: {options.mode} needs a drafter, and this engine has none")
        prompt = checked_prompt(prompt_ids, self.target.vocab_size, self.target.context)
        stop = self.target.eos_token_ids if params.stop_token_ids is None else params.stop_token_ids
        if bad := [token for token in stop if token >= self.target.vocab_size]:
            raise ConfigError(f"stop_token_ids: expected ids below {self.target.vocab_size}, got {bad[0]}")
        width = options.width(self.drafter.depth if self.drafter else 0)
        max_new = min(params.max_new_tokens, self.target.context - len(prompt))
        least, most = (Request.most_slots(len(prompt), max_new, nodes) for nodes in (1, width))
        if least > self.config.slots:
            raise CapacityError(
                f"request: needs up to {least} slots ({len(prompt)} prompt + {max_new} new tokens) without drafts, "
                f"but the pool has {self.config.slots}"
            )
        ids = np.zeros(len(prompt) + max_new, dtype=np.int64)
        ids[: len(prompt)] = prompt
        request = Request(
            id=self._next_id,
            ids=ids,
            prompt_length=len(prompt),
            params=params,
            draft=options,
            seed=fresh_seed() if params.seed is None else params.seed,
            width=width,
            stop=frozenset(stop),
            slots=np.zeros(min(most, self.config.slots), dtype=np.int64),
            length=len(prompt),
            top_logprobs=top_logprobs,
        )
        self._next_id += 1
        self._requests[request.id] = request
        self._scheduler.submit(request)
        return request.id

    def abort(self, request_id: int) -> bool:
        """End a request now, waiting or running, and free its slots; False if it has ended already (or never was).

        From a callback inside a step, a running request ends with that step: it may get the step's tokens yet.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish is not None:
            return False
        self._scheduler.abort(request)
        return True

    def set_verify_mode(self, mode: VerifyMode | str) -> None:
        """Change the verify mode from the next step on; ConfigError for anything but off, validate, on."""
        self._attention.mode = env.parse_verify_mode(mode)

    # -- what is done -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Admit, prefill at most one chunk's tokens, then one verify step for every decoding request.

        Returns one output for each request that got tokens or ended. ContractError inside another step.
        """
        with self._scheduler.step():
            self._attention.begin()
            self._scheduler.admit()
            outputs = self._prefill()
            ready = sorted(self._scheduler.reserve(), key=lambda r: r.group)
            for requests in [list(group) for _, group in groupby(ready, key=lambda r: r.group)]:
                new = self._stepper.decode(requests)
                outputs += [self._output(*each) for each in zip(requests, new, strict=True)]
            self.metrics.retractions += self._scheduler.take_retractions()
        return outputs

    def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        draft: DraftMode | str = DraftMode.TREE,
        budget: Budget = None,
    ) -> Iterator[list[int]]:
        """Submit (at once, so errors come from this call) and yield new tokens as steps commit them.

        Other requests advance meanwhile. Closing the iterator early aborts the request.
        """
        return self._tokens_of(self.submit(prompt_ids, params, draft=draft, budget=budget))

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        draft: DraftMode | str = DraftMode.TREE,
        budget: Budget = None,
    ) -> Result:
        """Submit one request and run until it has ended."""
        self._scheduler.check_idle("generate")
        return self.finish(self.submit(prompt_ids, params, draft=draft, budget=budget))

    def finish(self, request_id: int) -> Result:
        """Run until the request has ended; returns its result and forgets it. ContractError for an unknown id."""
        while not self.ended(request_id):
            self.step()
        return self.result(request_id)

    def ended(self, request_id: int) -> bool:
        """True once the request has finished or was aborted; ContractError for an unknown or forgotten id."""
        return self._known(request_id).finish is not None

    def result(self, request_id: int) -> Result:
        """The result of a request that has ended, which is then forgotten; ContractError if it has not."""
        request = self._known(request_id)
        if request.finish is None:
            raise ContractError.of("result", "request_id", "a request that has ended", request_id)
        del self._requests[request_id]
        return request.result(request.finish)

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def verify_mode(self) -> VerifyMode:
        """The mode of the next step."""
        return self._attention.mode

    def observe_verify(self, observer: VerifyObserver) -> None:
        """Tell ``observer`` of every verify call from now on."""
        self._attention.observer = observer

    @property
    def verify_record(self) -> VerifyRecord:
        """What ``validate`` has recorded since the start or the last ``reset_record``."""
        return self._attention.record

    def reset_record(self) -> None:
        """Start a new verify record."""
        self._attention.record = VerifyRecord()

    def audit(self) -> PoolAudit:
        """Check that no slot is lost, owned twice or listed by the wrong request; PoolCorruption otherwise."""
        return self._cache.audit(self._scheduler.requests)

    # -----------------------------------------------------------------------------------------------------------------

    def _prefill(self) -> list[Output]:
        """Prefill oldest first until the chunk is used up."""
        outputs: list[Output] = []
        room = self.config.prefill_chunk
        for request in list(self._scheduler.running):
            if request.decoding or room == 0:
                continue
            before = request.committed
            new = self._stepper.prefill(request, room)
            room -= request.committed - before
            if new:
                outputs.append(self._output(request, new))
        return outputs

    def _output(self, request: Request, new: list[int]) -> Output:
        self.metrics.tokens += len(new)
        self._scheduler.advanced(request)
        return Output(request.id, new, request.finish, request.logprobs[len(request.logprobs) - len(new) :])

    def _tokens_of(self, request_id: int) -> Iterator[list[int]]:
        request = self._known(request_id)
        told = 0
        try:
            while True:
                if request.length - request.prompt_length > told:
                    new = request.tokens[told:]
                    told += len(new)
                    yield new
                elif request.finish is not None:
                    return
                else:
                    self.step()
        finally:
            self.abort(request_id)
            self._requests.pop(request_id, None)

    def _known(self, request_id: int) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            raise ContractError.of("engine", "request_id", "an id from submit, not yet forgotten", request_id)
        return request
