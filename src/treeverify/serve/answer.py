"""A result of the engine in the form of SGLang's answer to ``/generate``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from treeverify.engine.request import FinishReason, Result, TokenLogprob


def answer(result: Result, text: str | None, prompt_tokens: int, rid: str, seconds: float) -> dict[str, Any]:
    """Text, token ids, and ``meta_info``. ``text`` is None where the server has no tokenizer."""
    steps = result.acceptance_lengths
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": _finish(result),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(result.tokens),
        "cached_tokens": 0,
        "e2e_latency": seconds,
    }
    if steps:  # as SGLang has it: all new tokens over verify steps, prefill's token counted among them
        accepted = Counter(length - 1 for length in steps)
        meta["spec_verify_ct"] = len(steps)
        meta["spec_accept_length"] = len(result.tokens) / len(steps)
        meta["spec_correct_drafts_histogram"] = [accepted[n] for n in range(max(accepted) + 1)]
    if result.logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[entry.logprob, entry.token, None] for entry in result.logprobs]
        if result.logprobs[0].top:
            meta["output_top_logprobs"] = [_top(entry) for entry in result.logprobs]
    return {"text": text, "output_ids": result.tokens, "meta_info": meta}


def _top(entry: TokenLogprob) -> list[list[float | int | None]]:
    return [[logprob, token, None] for token, logprob in entry.top]


def _finish(result: Result) -> dict[str, Any]:
    if result.finish is FinishReason.STOP:
        return {"type": "stop", "matched": result.tokens[-1]}
    return {"type": str(result.finish), "length": len(result.tokens)}
