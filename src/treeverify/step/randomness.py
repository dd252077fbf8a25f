"""Random numbers of a request as a function of its seed and a position: nothing waits, ranks and hosts agree.

SplitMix64: the seed is mixed once, then each position steps the state by the golden ratio and is mixed again. The token
at position p is drawn with the number of p, so a text does not depend on the batch, the draft, the width, or a
retraction. All nodes of one depth share a position and so a number. That keeps the law exact: a walk visits one node
per depth, so it never uses a number twice, and which node it visits depends on earlier numbers only. It follows that
*plain decoding and tree verification give the same tokens for the same seed*.
"""

from __future__ import annotations

import hashlib
import secrets

import torch

SEED_LIMIT = 1 << 63
"""Seeds are 0 .. SEED_LIMIT - 1."""
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
    """Float64 ``[batch, count]`` in [0, 1) for the positions after ``first``; both arguments int64 ``[batch]``."""
    positions = first[:, None] + torch.arange(1, count + 1, device=first.device)
    words = _mix(_mix(seeds)[:, None] + positions * _GOLDEN)
    return _shifted(words, 11).to(torch.float64) * 2.0**-53


def fresh_seed() -> int:
    """A seed from the operating system, for a request that named none and has no name."""
    return secrets.randbelow(SEED_LIMIT)


def seed_of(name: str, given: int | None) -> int:
    """The seed of a request as int64: the one it names, else one that follows from its name, alike on every rank."""
    if given is not None:
        return int(given) % SEED_LIMIT
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
