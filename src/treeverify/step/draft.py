"""From the drafter's block to a batch of draft trees, on the device; with CUDA graphs the tail of the draft's graph.

The drafter has no output head: the target's is applied to its hidden states, each rank's own part of the vocabulary.
Ranked candidates per depth, then the best-first search: ``ops.draft_topk`` and ``ops.tree_build``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from treeverify.ops.draft_topk.api import draft_topk, draft_topk_combine, draft_topk_shard
from treeverify.ops.draft_topk.contract import Ranked, workspace_elements
from treeverify.ops.tree_build.api import tree_build
from treeverify.ops.tree_build.contract import DraftTrees


def front(trees: DraftTrees, width: int) -> DraftTrees:
    """The trees of the first ``width`` nodes of each: best-first order makes them trees.

    Tokens and parents, which operators read, are contiguous; depths and scores are views.
    """
    return DraftTrees(
        trees.tokens[:, :width].contiguous(),
        trees.parents[:, :width].contiguous(),
        trees.depths[:, :width],
        trees.scores[:, :width],
        trees.widths.clamp(max=width),
    )


@dataclass(frozen=True)
class Head:
    """This rank's rows of the target's output head."""

    weight: torch.Tensor
    """``[rows, hidden]``: the vocabulary from ``first_id`` on, without padding."""
    first_id: int
    group: Any
    """SGLang's group of the ranks that hold the other rows; None if there are none."""


@dataclass(frozen=True)
class _Buffers:
    """What a captured graph writes to, for ``requests``."""

    trees: DraftTrees
    ranked: Ranked
    workspace: torch.Tensor
    shards: torch.Tensor
    """``[ranks, requests, depth, k + 1]`` int64; empty without other ranks."""
    fronts: dict[int, DraftTrees] = field(default_factory=dict)
    """Views of the first requests' trees, by their number."""


class TreeDraft:
    """Builds trees of ``width`` nodes from blocks of ``block`` tokens, the root's place in front."""

    def __init__(self, head: Head, block: int, width: int, requests: int) -> None:
        """``requests``: of the largest batch that a graph is captured for; its buffers never move."""
        self.block, self.width = block, width
        self._head, self._depth, self._k = head, block - 1, width - 1
        self._captured = self._larger = self._make(requests)

    def reserve(self, requests: int) -> None:
        """Make room for a batch that no graph serves."""
        if requests > len(self._larger.trees.tokens):
            self._larger = self._make(requests)

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor) -> None:
        """Build the trees of hidden states ``[batch*block, hidden]`` whose blocks are ``ids [batch*block]``."""
        states = hidden.view(-1, self.block, hidden.shape[-1])[:, 1:].to(self._head.weight.dtype)
        logits = torch.matmul(states, self._head.weight.T)
        ranked = self._rank(logits)
        roots = ids.view(-1, self.block)[:, 0].contiguous()
        tree_build(ranked.log_probs, ranked.token_ids, roots, budget=self._k, out=self.trees(len(states)))

    def trees(self, requests: int) -> DraftTrees:
        """The trees of the first ``requests`` of the last call."""
        held = self._held(requests)
        if requests not in held.fronts:
            held.fronts[requests] = DraftTrees(*(tensor[:requests] for tensor in vars(held.trees).values()))
        return held.fronts[requests]

    def _held(self, requests: int) -> _Buffers:
        return self._captured if requests <= len(self._captured.trees.tokens) else self._larger

    def _rank(self, logits: torch.Tensor) -> Ranked:
        requests = len(logits)
        held = self._held(requests)
        out = Ranked(held.ranked.log_probs[:requests], held.ranked.token_ids[:requests])
        if self._head.group is None:
            return draft_topk(logits, self._k, out=out, workspace=held.workspace)
        shards = held.shards.flatten()[: held.shards.shape[0] * requests * self._depth * (self._k + 1)]
        shards = shards.view(held.shards.shape[0], requests, self._depth, self._k + 1)
        mine = draft_topk_shard(logits, self._k, first_id=self._head.first_id, workspace=held.workspace)
        self._head.group.all_gather_into_tensor(shards, mine)
        return draft_topk_combine(shards, out=out)

    def _make(self, requests: int) -> _Buffers:
        device, group = self._head.weight.device, self._head.group
        ranks = 0 if group is None else group.world_size
        elements = workspace_elements(requests, self._depth, self._head.weight.shape[0], self._k)
        return _Buffers(
            DraftTrees.empty(requests, self.width, device),
            Ranked.empty(requests, self._depth, self._k, device),
            torch.empty(elements, dtype=torch.int64, device=device),
            torch.empty(ranks, requests, self._depth, self._k + 1, dtype=torch.int64, device=device),
        )
