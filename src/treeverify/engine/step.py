"""The forwards of an engine: prefill, and a decode step, which is `step.Step`'s."""

from __future__ import annotations

from time import perf_counter

import torch

from treeverify.engine.budget import WidthPolicy
from treeverify.engine.host import Batch, EngineHost, check_logits
from treeverify.engine.logprobs import note_logprobs
from treeverify.engine.request import Request
from treeverify.step.step import Step


class Stepper:
    """Runs forwards for requests that already own the slots they need; knows nothing of queues."""

    def __init__(self, host: EngineHost, policy: WidthPolicy | None = None) -> None:
        """All state is the host's and the policy's."""
        self.host, self._metrics, self._policy = host, host.metrics, policy
        block = 1 if host.drafter is None else host.drafter.depth + 1
        self.step: Step[Batch, list[list[int]]] = Step(host, block, host.metrics.spent)

    def prefill(self, request: Request, limit: int) -> list[int]:
        """Commit up to ``limit`` more tokens as a causal chain; the last chunk starts decoding.

        Returns the first new token when the prompt is done, [] before that and after a retraction.
        """
        host, batch, started = self.host, Batch([request]), perf_counter()
        begin, goal = request.committed, request.prefill_goal
        end = min(goal, begin + limit)
        ids, slots = host.put(request.ids[begin:end].copy()), host.put(request.slots[begin:end].copy())
        positions = torch.arange(begin, end, device=host.device)
        first = end == goal and request.length == request.prompt_length
        layers = host.feature_layers(batch)
        logits, features = host.target.forward(
            ids,
            positions,
            host.cache.layers,
            host.attention.prefill(host.call(batch, end - begin, None)),
            slots=slots,
            rows=torch.tensor([end - begin - 1] if first else [], dtype=torch.int64, device=host.device),
            feature_layers=layers,
        )
        # Sampled before anything is recorded: a refusal (NaN logits) leaves the request where it was.
        new: list[int] = []
        if first:
            check_logits(batch, logits)
            new = self.step.next(batch, ids[-1:], logits, positions[-1:], host.law(batch)).tolist()
        if layers:
            host.write_context(features, slots, positions)
        request.committed, request.decoding = end, end == goal
        self._metrics.prefill_tokens += end - begin
        kept = request.take(new)
        note_logprobs(request, logits, kept)
        self._metrics.spent("prefill", started)
        return kept

    def decode(self, requests: list[Request]) -> list[list[int]]:
        """One step for decoding requests of one group; returns each one's new tokens (at least one)."""
        batch = Batch(requests, self._policy if requests[0].draft.auto else None)
        if batch.drafts and (batch.policy is None or batch.policy.drafts(len(requests), batch.context)):
            return self.step.drafted(batch)
        return self.step.plain(batch, 1)
