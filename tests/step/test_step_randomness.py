"""Random numbers by seed and position: the published generator, the same for whoever serves a step."""

from __future__ import annotations

import torch

from treeverify.step import randomness


def splitmix64(seed: int, place: int) -> float:
    """The published generator in Python's integers: output ``place`` (from 1) of the stream from mix(seed) on."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    return (mix((mix(seed) + place * 0x9E3779B97F4A7C15) & mask) >> 11) * 2.0**-53


def test_uniforms_are_splitmix64_at_the_positions() -> None:
    seeds, first = [0, 1, 2**63 - 1], [0, 5, 4000]
    got = randomness.uniforms(torch.tensor(seeds), torch.tensor(first), 4)
    want = [[splitmix64(seed, place + 1 + i) for i in range(4)] for seed, place in zip(seeds, first, strict=True)]
    assert got.tolist() == want
    later = randomness.uniforms(torch.tensor(seeds), torch.tensor(first) + 1, 3)
    assert torch.equal(later, got[:, 1:])  # a function of the position, not of where a step began


def test_uniforms_are_uniform() -> None:
    """10^5 numbers of one request: mean and variance within 5 standard errors of 1/2 and 1/12."""
    values = randomness.uniforms(torch.tensor([7]), torch.tensor([0]), 100_000)[0].numpy()
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 5 * (1 / 12 / 1e5) ** 0.5
    assert abs(values.var() - 1 / 12) < 5 * (1 / 180 / 1e5) ** 0.5


def test_seeds() -> None:
    assert randomness.seed_of("a", 5) == 5
    assert randomness.seed_of("a", None) == randomness.seed_of("a", None) != randomness.seed_of("b", None)
    assert 0 <= randomness.seed_of("a", None) < 2**63
    assert 0 <= randomness.fresh_seed() != randomness.fresh_seed() < randomness.SEED_LIMIT
