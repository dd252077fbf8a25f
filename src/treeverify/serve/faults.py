"""Faults planted into our kernel, to prove that a cutover stops each: each is one that a real kernel has had.

- ``wrong-mask``: the tree's mask is dropped, so that siblings see each other;
- ``scaled``: every output is 5 % too large, as with a scale applied twice in part;
- ``nan-head``: the last head of layer 1 is NaN;
- ``swapped-heads``: the first two heads of layer 1 are exchanged;
- ``one-head-2ulp``: the first head of layer 1 is off by 2 bfloat16 ULP of each row's largest value.

The baseline is left alone. ``validate`` therefore serves right answers and records the fault; ``on`` serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from treeverify.engine.verify import Implementation, VerifyBatch
from treeverify.errors import ConfigError

LAYER = 1
"""The layer that the faults of one layer break."""
SCALE = 1.05
ULP = 2
_BF16_FRACTION_BITS = 7

Spoil = Callable[[torch.Tensor], None]
"""Changes out [tokens, heads, 512] of one layer in place."""


def plant(name: str, mine: Implementation) -> Implementation:
    """``mine`` with the fault ``name``; ConfigError that lists them for another name."""
    if name == "wrong-mask":
        return lambda q, draft, pool, batch, scale: mine(q, draft, pool, replace(batch, tree_bits=None), scale)
    if name == "scaled":
        return _Spoiled(mine, _scale, every_layer=True)
    if name not in _ONE_LAYER:
        raise ConfigError(f"TREEVERIFY_FAULT: expected one of {', '.join(NAMES)}; got {name!r}")
    return _Spoiled(mine, _ONE_LAYER[name], every_layer=False)


class _Spoiled:
    """Calls ``mine`` and spoils its output. Layers are told apart by their place among the calls of one batch."""

    def __init__(self, mine: Implementation, spoil: Spoil, *, every_layer: bool) -> None:
        self._mine, self._spoil, self._every_layer = mine, spoil, every_layer
        self._batch: VerifyBatch | None = None
        self._layer = 0

    def __call__(
        self, q: torch.Tensor, draft_kv: torch.Tensor, kv_pool: torch.Tensor, batch: VerifyBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._layer = self._layer + 1 if batch is self._batch else 0
        self._batch = batch
        out, lse = self._mine(q, draft_kv, kv_pool, batch, scale)
        if self._every_layer or self._layer == LAYER:
            self._spoil(out)
        return out, lse


def _scale(out: torch.Tensor) -> None:
    out *= SCALE


def _nan_head(out: torch.Tensor) -> None:
    out[:, -1] = float("nan")


def _swap_heads(out: torch.Tensor) -> None:
    out[:, [0, 1]] = out[:, [1, 0]]


def _shift_one_head(out: torch.Tensor) -> None:
    largest = out[:, 0].float().abs().amax(dim=-1, keepdim=True).clamp_(min=2.0**-126)
    spacing = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - _BF16_FRACTION_BITS)
    out[:, 0] += (ULP * spacing).to(out.dtype)


_ONE_LAYER: dict[str, Spoil] = {
    "nan-head": _nan_head,
    "swapped-heads": _swap_heads,
    "one-head-2ulp": _shift_one_head,
}
NAMES = ("wrong-mask", "scaled", *_ONE_LAYER)
