"""Log-probabilities of new tokens, for requests that asked for them."""

from __future__ import annotations

import torch

from treeverify.engine.request import Request, TokenLogprob


def note_logprobs(request: Request, logits: torch.Tensor, tokens: list[int]) -> None:
    """Append one entry per token: ``tokens[i]`` was drawn from ``logits`` float32 [>= len(tokens), vocab], row i."""
    if request.top_logprobs is None or not tokens:
        return
    law = torch.log_softmax(logits[: len(tokens)].double(), dim=-1)
    values, ids = law.topk(request.top_logprobs, dim=-1)
    chosen = law[torch.arange(len(tokens)), torch.tensor(tokens)]
    for token, logprob, best, them in zip(tokens, chosen.tolist(), ids.tolist(), values.tolist(), strict=True):
        request.logprobs.append(TokenLogprob(token, logprob, tuple(zip(best, them, strict=True))))
