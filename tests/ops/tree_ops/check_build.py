"""tree_build against tree.build, bit for bit: ties, -inf, exhausted candidates, sizes round the warp's edge."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from tree_cases import Buffers, equal

from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.tree.build import Candidates, build_tree

# Few distinct values, so that sums tie; thirds, so that float32 sums round; -inf is never drafted; -0.0 ties with 0.0.
VALUES = np.array([0.0, -0.0, -0.25, -0.5, -1.0, -1 / 3, -2 / 3, -0.1, -1e-8, -20.0, -np.inf], dtype=np.float32)


def candidates(random: np.random.Generator, batch: int, depth: int, k: int, values: np.ndarray | None):
    """Log-probabilities, sorted, from ``values`` or (None) of random logits; token ids with repeats."""
    if values is None:
        rows = np.log(random.dirichlet(np.full(k + 1, 0.3), (batch, depth)) + 1e-30)[..., :k]
    else:
        rows = random.choice(values, (batch, depth, k))
    log_probs = -np.sort(-rows.astype(np.float32), axis=-1)
    ids = random.integers(0, 2**40, (batch, depth, k))
    return torch.from_numpy(log_probs), torch.from_numpy(ids)


def agrees(ops, log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int) -> None:
    batch, width = len(log_probs), budget + 1
    roots = torch.arange(batch) + 7
    buffers = Buffers(ops.device)
    out = buffers.like(DraftTrees.empty(batch, width, "cpu"))
    moved = (tensor.to(ops.device) for tensor in (log_probs, token_ids, roots))
    ops.tree_build(*moved, budget=budget, out=out)
    buffers.intact()
    for request in range(batch):
        found = Candidates(log_probs[request].numpy(), token_ids[request].numpy())
        tree = build_tree(int(roots[request]), found, budget)
        rest = width - tree.width
        equal("widths", out.widths[request], tree.width)
        equal("tokens", out.tokens[request], [*tree.tokens.tolist(), *[int(roots[request])] * rest])
        equal("parents", out.parents[request], [*tree.parents.tolist(), *[-1] * rest])
        equal("depths", out.depths[request], [*tree.depths.tolist(), *[0] * rest])
        scores = scores_of(found, tree)
        equal("scores", out.scores[request], [*scores, *[-np.inf] * rest])


def scores_of(found: Candidates, tree) -> list[float]:
    """Cumulative log-probabilities in float32: a parent's children come in order of rank."""
    scores, children = [np.float32(0)], [0] * tree.width
    for node in range(1, tree.width):
        parent, depth = int(tree.parents[node]), int(tree.depths[node])
        scores.append(scores[parent] + found.log_probs[depth - 1, children[parent]])
        children[parent] += 1
    return [float(score) for score in scores]


def ties_and_minus_infinity(ops) -> None:
    random = np.random.default_rng(0)
    for _ in range(150):
        depth, k, budget = (int(random.integers(0, high)) for high in (6, 7, 41))
        agrees(ops, *candidates(random, 3, depth, k, VALUES), budget)


def all_equal(ops) -> None:
    """Nothing but ties: the rank tuples alone decide, over every word of them."""
    for depth, k, budget in ((4, 4, 40), (16, 3, 64), (32, 2, 256), (1, 256, 256), (32, 1, 32), (2, 256, 256)):
        agrees(ops, torch.zeros(1, depth, k), torch.arange(depth * k).view(1, depth, k), budget)


def sizes(ops) -> None:
    random = np.random.default_rng(1)
    for depth, k, budget in itertools.product((1, 7, 15, 16, 32), (1, 2, 8, 64, 256), (1, 31, 32, 33, 64, 256)):
        agrees(ops, *candidates(random, 1, depth, k, None), budget)


def batches(ops) -> None:
    random = np.random.default_rng(2)
    for batch in (1, 2, 5, 33):
        agrees(ops, *candidates(random, batch, 15, 32, None), 32)
    agrees(ops, *candidates(random, 4, 15, 64, VALUES), 256)


def nothing_to_draft(ops) -> None:
    minus = torch.full((2, 3, 4), -torch.inf)
    agrees(ops, minus, torch.zeros(2, 3, 4, dtype=torch.int64), 5)
    minus[1, 0, 0] = -1.0  # one node, then the draft ends
    agrees(ops, minus, torch.ones(2, 3, 4, dtype=torch.int64), 5)
    for shape in ((2, 0, 4), (2, 4, 0), (0, 4, 4)):
        agrees(ops, torch.zeros(shape), torch.zeros(shape, dtype=torch.int64), 5)
    agrees(ops, torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.int64), 0)


CHECKS = {check.__name__: check for check in (ties_and_minus_infinity, all_equal, sizes, batches, nothing_to_draft)}
