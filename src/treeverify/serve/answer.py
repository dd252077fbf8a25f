"""Results of the engine in the form of SGLang's answers to ``/generate``, in one piece or streamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeverify.engine.request import FinishReason, Result, TokenLogprob


@dataclass(frozen=True)
class Asked:
    """What an answer says of its request."""

    rid: str
    prompt_tokens: int


def piece(asked: Asked, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], text: str | None) -> dict[str, Any]:
    """All that a request has so far; ``text`` is None where the server has no tokenizer."""
    meta: dict[str, Any] = {
        "id": asked.rid,
        "finish_reason": None,
        "prompt_tokens": asked.prompt_tokens,
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
    }
    if logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[entry.logprob, entry.token, None] for entry in logprobs]
        if logprobs[0].top:
            meta["output_top_logprobs"] = [_top(entry) for entry in logprobs]
    return {"text": text, "output_ids": list(tokens), "meta_info": meta}


def answer(asked: Asked, result: Result, text: str | None, seconds: float) -> dict[str, Any]:
    """The whole answer: as ``piece``, with why it ended and what its steps did."""
    found = piece(asked, result.tokens, result.logprobs, text)
    meta, steps = found["meta_info"], result.acceptance_lengths
    meta |= {"finish_reason": _finish(result), "e2e_latency": seconds}
    if steps:  # as SGLang has it: all new tokens over verify steps, prefill's token counted among them
        accepted = Counter(length - 1 for length in steps)
        meta["spec_verify_ct"] = len(steps)
        meta["spec_accept_length"] = len(result.tokens) / len(steps)
        meta["spec_correct_drafts_histogram"] = [accepted[n] for n in range(max(accepted) + 1)]
    return found


def _top(entry: TokenLogprob) -> list[list[float | int | None]]:
    return [[logprob, token, None] for token, logprob in entry.top]


def _finish(result: Result) -> dict[str, Any]:
    if result.finish is FinishReason.STOP:
        return {"type": "stop", "matched": result.tokens[-1]}
    return {"type": str(result.finish), "length": len(result.tokens)}
