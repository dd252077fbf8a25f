"""tree_mask against tree.visibility, tree.packing and SGLang's layouts. Covers F3, F22, F24, F25 of the faults."""

from __future__ import annotations

import numpy as np
import torch
from tree_cases import GUARD_BYTE, WIDTHS, Buffers, equal, padded, random_trees

from treeverify.ops.tree_mask.contract import TreeMasks
from treeverify.tree.packing import pack_rows
from treeverify.tree.visibility import visibility


def all_outputs(buffers: Buffers, batch: int, width: int, prefixes: list[int], mask: torch.dtype) -> TreeMasks:
    cells = width * (sum(prefixes) + batch * width)
    return TreeMasks(
        buffers.empty(batch, width, -(-width // 64), dtype=torch.int64),
        buffers.empty(batch * width, dtype=torch.int64),
        buffers.empty(cells, dtype=torch.uint8).view(mask),
        buffers.empty(batch * width * width, dtype=torch.uint8).view(mask),
        buffers.empty(3, batch, width, dtype=torch.int64),
    )


def seen(tree, width: int) -> np.ndarray:
    """Visibility with padding: each padding node sees itself."""
    mask = np.eye(width, dtype=np.bool_)
    mask[: tree.width, : tree.width] = visibility(tree)
    return mask


def links(tree, width: int, request: int) -> list[list[int]]:
    """By brute force: first child, and next child of the same parent."""
    parents = [*tree.parents.tolist(), *[-1] * (width - tree.width)]
    child = [next((k for k in range(width) if parents[k] == node), -1) for node in range(width)]
    sibling = [
        next((k for k in range(node + 1, width) if parent >= 0 and parents[k] == parent), -1)
        for node, parent in enumerate(parents)
    ]
    return [list(range(request * width, (request + 1) * width)), child, sibling]


def agrees(ops, trees, width: int, prefixes: list[int], mask=torch.uint8, index=torch.int64) -> None:
    batch = len(trees)
    _, parents = padded(trees, width, ops.device)
    buffers = Buffers(ops.device)
    out = all_outputs(buffers, batch, width, prefixes, mask)
    ops.tree_mask(parents, torch.tensor(prefixes, dtype=index, device=ops.device), out=out)
    buffers.intact()
    masks = [seen(tree, width) for tree in trees]
    depths = [[*tree.depths.tolist(), *[0] * (width - tree.width)] for tree in trees]
    equal("bits", out.bits, np.stack([pack_rows(one) for one in masks]).view(np.int64))
    equal("positions", out.positions.view(batch, width), np.array(depths) + np.array(prefixes)[:, None])
    equal("qlen_mask", out.qlen_mask.view(torch.uint8).view(batch, width, width), np.stack(masks).astype(np.uint8))
    equal("retrieve", out.retrieve.transpose(0, 1), [links(tree, width, i) for i, tree in enumerate(trees)])
    begin = 0
    for one, prefix in zip(masks, prefixes, strict=True):
        cells = out.full_mask.view(torch.uint8)[begin : begin + width * (prefix + width)].view(width, prefix + width)
        equal("full_mask", cells[:, prefix:], one.astype(np.uint8))
        assert bool((cells[:, :prefix] == GUARD_BYTE).all()), "a prefix cell was written"
        begin += cells.numel()


def widths_round_the_word_and_the_block(ops) -> None:
    random = np.random.default_rng(0)
    for width in WIDTHS:
        agrees(ops, random_trees(random, 4, width), width, [0, 1, 21, 300])


def dtypes_and_batches(ops) -> None:
    random = np.random.default_rng(1)
    for batch in (1, 5, 40):
        for mask, index in ((torch.bool, torch.int32), (torch.uint8, torch.int64)):
            prefixes = random.integers(0, 50, batch).tolist()
            agrees(ops, random_trees(random, batch, 9), 9, prefixes, mask, index)


def only_what_is_asked_for(ops) -> None:
    random = np.random.default_rng(2)
    _, parents = padded(random_trees(random, 2, 9), 9, ops.device)
    prefixes = torch.tensor([4, 5], device=ops.device)
    buffers = Buffers(ops.device)
    every = all_outputs(buffers, 2, 9, [4, 5], torch.uint8)
    ops.tree_mask(parents, prefixes, out=every)
    for name, want in every.wanted.items():
        alone = all_outputs(buffers, 2, 9, [4, 5], torch.uint8)
        ops.tree_mask(parents, prefixes, out=TreeMasks(**{name: getattr(alone, name)}))
        equal(name, getattr(alone, name), want.cpu())
        others = [tensor for other, tensor in alone.wanted.items() if other != name]
        assert all(bool((tensor.view(torch.uint8) == GUARD_BYTE).all()) for tensor in others)
    ops.tree_mask(parents, prefixes, out=TreeMasks())
    buffers.intact()


def garbage_parents_are_padding(ops) -> None:
    parents = torch.tensor([[7, 0, 2, -5, 2**31 - 1, 5, 1]], dtype=torch.int32, device=ops.device)
    buffers = Buffers(ops.device)
    out = all_outputs(buffers, 1, 7, [3], torch.uint8)
    ops.tree_mask(parents, torch.tensor([3], device=ops.device), out=out)
    buffers.intact()
    equal("bits", out.bits[0, :, 0], [1, 3, 4, 8, 16, 32, 67])
    equal("positions", out.positions, [3, 4, 3, 3, 3, 3, 5])
    equal("next token", out.retrieve[1, 0], [1, 6, -1, -1, -1, -1, -1])
    equal("next sibling", out.retrieve[2, 0], [-1] * 7)


CHECKS = {
    check.__name__: check
    for check in (
        widths_round_the_word_and_the_block,
        dtypes_and_batches,
        only_what_is_asked_for,
        garbage_parents_are_padding,
    )
}
