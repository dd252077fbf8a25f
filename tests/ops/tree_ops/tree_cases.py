"""Inputs and buffers shared by the checks. Nothing here needs pytest, so that a GPU machine without it can run them."""

from __future__ import annotations

import numpy as np
import torch

from treeverify.tree.topology import Tree

GUARD_BYTES, GUARD_BYTE = 256, 0xA5
WIDTHS = (1, 2, 3, 9, 31, 32, 33, 63, 64, 65, 128, 129, 256, 257)


class Buffers:
    """Output buffers with guard bytes on both sides, all of them filled with the guard byte."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._whole: list[tuple[torch.Tensor, int]] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
        whole = torch.full((size + 2 * GUARD_BYTES,), GUARD_BYTE, dtype=torch.uint8, device=self._device)
        self._whole.append((whole, size))
        inside = whole[GUARD_BYTES : GUARD_BYTES + size]
        return (inside.view(dtype) if size else torch.empty(0, dtype=dtype, device=self._device)).view(shape)

    def like(self, made: object, **kept: object) -> object:
        """A guarded copy of a dataclass of (unwritten) outputs."""
        fields = {
            name: None if tensor is None else self.empty(*tensor.shape, dtype=tensor.dtype)
            for name, tensor in vars(made).items()
        }
        return type(made)(**fields)

    def intact(self) -> None:
        for whole, size in self._whole:
            assert bool((whole[:GUARD_BYTES] == GUARD_BYTE).all()), "written before an output"
            assert bool((whole[GUARD_BYTES + size :] == GUARD_BYTE).all()), "written past an output"


def random_tree(random: np.random.Generator, width: int, vocab: int = 6, recent: int = 4) -> Tree:
    """A tree whose nodes hang below one of the ``recent`` nodes before them (deep), or of all (shallow)."""
    parents = np.full(width, -1, dtype=np.int32)
    for node in range(1, width):
        parents[node] = random.integers(max(0, node - recent), node)
    return Tree(random.integers(0, vocab, width), parents)


def random_trees(random: np.random.Generator, batch: int, width: int, vocab: int = 6) -> list[Tree]:
    """Trees of one padded width, deep and shallow, whole and smaller, a chain and the root alone among them."""
    trees = []
    for request in range(batch):
        own = (width, max(1, width // 2), width, 1)[request % 4]
        recent = (4, width, 1, 1)[request % 4]
        trees.append(random_tree(random, own, vocab, recent))
    return trees


def padded(trees: list[Tree], width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 and parents int32 ``[batch, width]``, padded as tree_build pads."""
    tokens = torch.tensor([[*t.tokens.tolist(), *[int(t.tokens[0])] * (width - t.width)] for t in trees])
    parents = torch.tensor([[*t.parents.tolist(), *[-1] * (width - t.width)] for t in trees], dtype=torch.int32)
    return tokens.to(device), parents.to(device)


def equal(name: str, got: torch.Tensor, want: object) -> None:
    """Bit for bit, NaN included; says the first place that differs."""
    expected = torch.as_tensor(want, dtype=got.dtype)
    assert tuple(got.shape) == tuple(expected.shape), f"{name}: shape {list(got.shape)}, not {list(expected.shape)}"
    mine = got.cpu()
    same = (mine == expected) | ((mine != mine) & (expected != expected))
    if not bool(same.all()):
        at = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(f"{name}{list(at)}: {mine[at].item()}, not {expected[at].item()}")
