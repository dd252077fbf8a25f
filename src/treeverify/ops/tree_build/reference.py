"""The definition of ``tree_build``: one request at a time, the next node found by looking at the whole frontier."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from treeverify.ops.tree_build.contract import DraftTrees, check, check_values

_OUTSIDE = -np.float32(np.inf)


class _Open(NamedTuple):
    """A node that may be taken next: sorted by falling score, then by rank tuple."""

    negated: np.float32
    ranks: tuple[int, ...]
    parent: int


def tree_build_reference(
    log_probs: torch.Tensor, token_ids: torch.Tensor, roots: torch.Tensor, *, budget: int
) -> DraftTrees:
    """Build the trees; arguments and result as in ``api.tree_build``, whatever the device (values are read there).

    Raises:
        ContractError: the call breaks the contract, or a log-probability is NaN, positive or above the one before it.
    """
    check(log_probs, token_ids, roots, budget, None)
    check_values(log_probs)
    out = DraftTrees.empty(len(roots), budget + 1, roots.device)
    out.tokens.copy_(roots[:, None].expand_as(out.tokens))
    out.parents.fill_(-1)
    out.depths.fill_(0)
    out.scores.fill_(-torch.inf)
    for request in range(len(roots)):
        nodes = _best_first(log_probs[request].cpu().numpy(), budget)
        ids = token_ids[request].tolist()
        out.scores[request, 0] = 0.0
        out.widths[request] = len(nodes) + 1
        for number, node in enumerate(nodes, start=1):
            out.tokens[request, number] = ids[len(node.ranks) - 1][node.ranks[-1]]
            out.parents[request, number] = node.parent
            out.depths[request, number] = len(node.ranks)
            out.scores[request, number] = float(-node.negated)
    return out


def _best_first(log_probs: np.ndarray[tuple[int, ...], np.dtype[np.float32]], budget: int) -> list[_Open]:
    """The taken nodes in order; ``log_probs`` [depth, k]."""
    depth, k = log_probs.shape
    scores = [np.float32(0)]  # by node number
    taken: list[_Open] = []
    frontier: list[_Open] = []

    def put(ranks: tuple[int, ...], parent: int) -> None:
        if len(ranks) > depth or ranks[-1] >= k:
            return
        score = scores[parent] + log_probs[len(ranks) - 1, ranks[-1]]  # float32 + float32, rounded once
        if score > _OUTSIDE:
            frontier.append(_Open(-score, ranks, parent))

    put((0,), 0)
    while frontier and len(taken) < budget:
        node = min(frontier)
        frontier.remove(node)
        taken.append(node)
        scores.append(-node.negated)
        put((*node.ranks[:-1], node.ranks[-1] + 1), node.parent)
        put((*node.ranks, 0), len(taken))
    return taken
