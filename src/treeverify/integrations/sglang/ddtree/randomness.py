"""Random numbers of a request as a function of its seed and a position, on the device: nothing waits, ranks agree.

SplitMix64: the seed is mixed once, then each position steps the state by the golden ratio and is mixed again. As in
``engine.randomness`` all nodes of one depth share the number of their position, so that a text does not depend on the
batch, the width, or a retraction. (The numbers themselves are others than the engine's.)
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from treeverify.ops.tree_accept.contract import LawTensors

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64 whose bits are those of the unsigned numbers."""
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seeds: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
    """Float64 ``[batch, count]`` in [0, 1) for the positions from ``first`` (int64 ``[batch]``) on."""
    positions = first[:, None] + torch.arange(1, count + 1, device=first.device)
    words = _mix(_mix(seeds)[:, None] + positions * _GOLDEN)
    return _shifted(words, 11).to(torch.float64) * 2.0**-53


def seed_of(name: str, given: int | None) -> int:
    """The seed of a request as int64: the one it names, else one that follows from its name, alike on every rank."""
    if given is not None:
        return int(given) & ((1 << 63) - 1)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def is_greedy(sampling: Any) -> bool:
    """Whether no request of a batch samples; ``sampling`` is SGLang's account of them, None for nobody's batch."""
    return sampling is None or bool(sampling.is_all_greedy)


def law_of(sampling: Any) -> LawTensors:
    """How each request of a batch samples, from SGLang's account of them."""
    return LawTensors(
        temperature=sampling.temperatures.reshape(-1),
        top_k=sampling.top_ks.to(torch.int32),
        top_p=sampling.top_ps,
        min_p=sampling.min_ps,
    )
