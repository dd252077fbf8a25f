"""Random numbers as a function of (seed, absolute position), so that nothing else can change a sampled text.

The token at position p of a request is drawn with ``uniform(seed, p)``, whatever the batch, the draft mode, the budget,
and however often the request was retracted. All nodes of a tree at one depth share a position and so a number. That
keeps the law exact: a walk visits one node per depth, so it never uses a number twice, and which node it visits depends
on earlier numbers only. It follows that *plain decoding and tree verification give the same tokens for the same seed*.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SEED_LIMIT = 1 << 64
"""Seeds are 0 .. SEED_LIMIT - 1."""
_WORDS_PER_BLOCK = 4  # Philox4x64 makes four words for each value of its counter


def uniforms(seed: int, first: int, count: int) -> NDArray[np.float64]:
    """Float64 [count] in [0, 1) for positions first .. first + count - 1: 53 bits of Philox4x64 at counter p + 1."""
    words = np.random.Philox(key=seed, counter=first).random_raw(_WORDS_PER_BLOCK * count)[::_WORDS_PER_BLOCK]
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def fresh_seed() -> int:
    """A seed from the operating system, for a request that named none."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
