"""From the drafter's block to a batch of draft trees, on the device; with CUDA graphs the tail of the draft's graph.

The drafter has no output head: the target's is applied to its hidden states. Ranked candidates per depth, then the
best-first search: ``ops.draft_topk`` and ``ops.tree_build``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from treeverify.ops.tree_build.api import tree_build
from treeverify.ops.tree_build.contract import DraftTrees


@dataclass(frozen=True)
class Head:
    """This rank's rows of the target's output head."""

    weight: torch.Tensor
    """``[rows, hidden]``: the vocabulary from ``start`` on, without padding."""
    start: int
    vocab: int
    """Of all ranks together."""


class TreeDraft:
    """Builds trees of ``width`` nodes from blocks of ``block`` tokens; the outputs stay in place for a graph."""

    def __init__(self, head: Head, block: int, width: int, requests: int) -> None:
        self._head, self.block, self.width = head, block, width
        self._trees = DraftTrees.empty(0, width, head.weight.device)
        self.reserve(requests)

    def reserve(self, requests: int) -> None:
        """Make room for ``requests``; a captured graph keeps writing to what it captured, so reserve before."""
        if requests > self._trees.tokens.shape[0]:
            self._trees = DraftTrees.empty(requests, self.width, self._head.weight.device)

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor) -> None:
        """Build the trees of hidden states ``[batch*block, hidden]`` whose blocks are ``ids [batch*block]``."""
        states = hidden.view(-1, self.block, hidden.shape[-1])
        trees = self.trees(len(states))
        states = states[:, 1:].to(self._head.weight.dtype)  # position 0 is the root itself
        logits = torch.matmul(states, self._head.weight.T)
        log_probs, token_ids = ranked(logits, min(self.width - 1, self._head.vocab))
        roots = ids.view(-1, self.block)[:, 0].contiguous()
        tree_build(log_probs, token_ids, roots, budget=self.width - 1, out=trees)

    def trees(self, requests: int) -> DraftTrees:
        """The trees of the first ``requests`` of the last call."""
        held = self._trees
        if requests == len(held.widths):
            return held
        return DraftTrees(*(getattr(held, name)[:requests] for name in DraftTrees.__dataclass_fields__))


def ranked(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities float32 and token ids int64, ``[batch, depth, k]``, of the best tokens of each depth."""
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    lse = values.logsumexp(-1, keepdim=True)
    return (values[..., :k] - lse).clamp(max=0).contiguous(), ids[..., :k].contiguous()


def head_of(model: Any) -> Head:
    """Return the output head of a loaded target."""
    head = model.lm_head
    shard = getattr(head, "shard_indices", None)
    rows = head.weight.shape[0] if shard is None else shard.num_org_elements
    start = 0 if shard is None else shard.org_vocab_start_index
    return Head(head.weight[:rows], start, getattr(head, "org_vocab_size", rows))
