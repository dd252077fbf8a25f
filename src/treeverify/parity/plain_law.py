"""The exact law of a continuation, from nothing of the engine: a plain causal forward and a plain law of the logits.

What is judged draws through paged attention over a tree, a vectorised law and an acceptance walk. Here whole sequences
run through the target with dense causal attention, and one row's law is made by sorting it. Only the target's weights
and layers are shared with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from treeverify.models.target import Target
from treeverify.parity.law import Tokens

_LATENT = 512  # the part of a KV row that is also its value
_SEQUENCES = 128  # per forward


@dataclass(frozen=True)
class Setting:
    """How a prompt's tokens are drawn, in the order of the filters; ``top_k`` None, ``top_p`` 1, ``min_p`` 0: off."""

    temperature: float
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        """Return ``T=0.7 top-k=8``, what is off left out."""
        parts = [f"T={self.temperature:g}"]
        if self.top_k is not None:
            parts.append(f"top-k={self.top_k}")
        if self.top_p < 1:
            parts.append(f"top-p={self.top_p:g}")
        if self.min_p > 0:
            parts.append(f"min-p={self.min_p:g}")
        return " ".join(parts)


def plain_law(logits: NDArray[np.float64], setting: Setting) -> dict[int, float]:
    """Token to probability, for the tokens of positive probability, of one row of logits at a temperature above 0.

    Written from the definition, token by token: top-k, top-p on what top-k left, min-p against the likeliest token.
    """
    ranked: list[int] = np.argsort(-logits, kind="stable")[: setting.top_k].tolist()  # equal logits: the smaller id
    peak = float(logits[ranked[0]])
    weight = {token: math.exp((float(logits[token]) - peak) / setting.temperature) for token in ranked}
    total = math.fsum(weight.values())
    kept: dict[int, float] = {}
    mass = 0.0
    for token, value in weight.items():  # by falling weight
        if setting.top_p < 1 and mass >= setting.top_p * total:
            break
        mass += value
        if value >= setting.min_p and value > 0:
            kept[token] = value
    whole = math.fsum(kept.values())
    return {token: value / whole for token, value in kept.items()}


@torch.inference_mode()
def plain_logits(target: Target, sequences: NDArray[np.int64]) -> NDArray[np.float64]:
    """Logits [batch, vocab] after each row of ``sequences`` int64 [batch, length], by one causal forward, no pool."""
    batch, length = sequences.shape
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def attend(layer: int, q: torch.Tensor, draft_kv: torch.Tensor, kv_pool: torch.Tensor) -> torch.Tensor:
        keys = draft_kv.view(batch, length, -1)
        scores = torch.einsum("bihd,bjd->bhij", q.view(batch, length, *q.shape[1:]), keys) * target.scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bhij,bjd->bihd", weights, keys[..., :_LATENT]).flatten(0, 1)

    logits, _ = target.forward(
        torch.from_numpy(sequences.reshape(-1)),
        torch.arange(length).repeat(batch),
        list(target.new_pool(1)),
        attend,
        rows=torch.arange(1, batch + 1) * length - 1,
    )
    return logits.double().numpy()


class PlainLaw:
    """The next-token law after each continuation of one prompt; what ``law.exact_joint`` calls."""

    def __init__(
        self, target: Target, prompt: Sequence[int], setting: Setting, told: Callable[[int], None] | None = None
    ) -> None:
        """``told(n)`` hears how many prefixes each forward expanded."""
        self._target, self._prompt, self._setting = target, list(prompt), setting
        self._told = told or (lambda count: None)

    def __call__(self, prefixes: Sequence[Tokens]) -> NDArray[np.float64]:
        """Float64 [len(prefixes), vocab]; prefixes of one length."""
        laws = np.zeros((len(prefixes), self._target.vocab_size))
        for begin in range(0, len(prefixes), _SEQUENCES):
            some = prefixes[begin : begin + _SEQUENCES]
            logits = plain_logits(self._target, np.array([[*self._prompt, *p] for p in some], dtype=np.int64))
            for row, values in enumerate(logits):
                for token, probability in plain_law(values, self._setting).items():
                    laws[begin + row, token] = probability
            self._told(len(some))
        return laws
