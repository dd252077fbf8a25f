"""The contract of ``tree_build``: DDTree's best-first search (arXiv 2604.12989), the rule of ``tree.build``.

- ``score(child) = fl32(score(parent) + log_probs[depth, rank])``, from 0 at the root, in float32;
- nodes are taken by falling score, equal scores by the lexicographically smaller rank tuple; a node's number is its
  place in that order. A score of -inf or NaN is never drafted (``tree.build`` refuses NaN; so does a call on a CPU).

A tree has ``budget`` nodes beside its root unless the candidates run out first. Shapes are static, so the rest is
*padding*: nodes ``widths[i]`` and up repeat the root's token, have parent -1, depth 0 and score -inf. A padding node is
nobody's child, sees only itself and the prefix (``tree_mask``) and is never accepted (``tree_accept``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeverify.errors import ContractError
from treeverify.ops.checks import Checker

OPERATOR = "tree_build"
MAX_BUDGET, MAX_DEPTH, MAX_K = 256, 32, 256
"""What the kernel holds; the reference has no limits but shares them, so that one call runs anywhere."""


@dataclass(frozen=True, eq=False)
class DraftTrees:
    """A batch of trees, each padded to ``width`` = budget + 1 nodes; node 0 is the root."""

    tokens: torch.Tensor
    """``[batch, width]`` int64."""
    parents: torch.Tensor
    """``[batch, width]`` int32: -1 for the root and for padding, else a smaller node number."""
    depths: torch.Tensor
    """``[batch, width]`` int32: 0 for the root and for padding."""
    scores: torch.Tensor
    """``[batch, width]`` float32: cumulative log-probability; 0 for the root, -inf for padding."""
    widths: torch.Tensor
    """``[batch]`` int32: nodes of the tree, root included, padding not."""

    @classmethod
    def empty(cls, batch: int, width: int, device: torch.device | str) -> DraftTrees:
        """Unwritten outputs for ``batch`` trees of ``width`` nodes."""
        return cls(
            torch.empty(batch, width, dtype=torch.int64, device=device),
            torch.empty(batch, width, dtype=torch.int32, device=device),
            torch.empty(batch, width, dtype=torch.int32, device=device),
            torch.empty(batch, width, dtype=torch.float32, device=device),
            torch.empty(batch, dtype=torch.int32, device=device),
        )


def check(
    log_probs: torch.Tensor, token_ids: torch.Tensor, roots: torch.Tensor, budget: int, out: DraftTrees | None
) -> Checker:
    """Check one call (see ``api.tree_build``); raises ``ContractError``. Reads no value of a tensor."""
    checker = Checker.of(OPERATOR, "log_probs", log_probs)
    checker.integer("budget", budget, 0, MAX_BUDGET)
    checker.tensor("log_probs", log_probs, (torch.float32,), (None, None, None))
    batch, depth, k = log_probs.shape
    checker.integer("log_probs: dimension 1 (depth)", depth, 0, MAX_DEPTH)
    checker.integer("log_probs: dimension 2 (k)", k, 0, MAX_K)
    checker.tensor("token_ids", token_ids, (torch.int64,), (batch, depth, k))
    checker.tensor("roots", roots, (torch.int64,), (batch,))
    if out is not None:
        width = budget + 1
        checker.tensor("out.tokens", out.tokens, (torch.int64,), (batch, width))
        checker.tensor("out.parents", out.parents, (torch.int32,), (batch, width))
        checker.tensor("out.depths", out.depths, (torch.int32,), (batch, width))
        checker.tensor("out.scores", out.scores, (torch.float32,), (batch, width))
        checker.tensor("out.widths", out.widths, (torch.int32,), (batch,))
    return checker


def check_values(log_probs: torch.Tensor) -> None:
    """Check the values of a call on a CPU; raises ``ContractError`` for NaN, positive or rising log-probabilities."""
    bound = torch.cat([torch.zeros_like(log_probs[..., :1]), log_probs[..., :-1]], dim=-1)
    bad = ~(log_probs <= bound)  # a NaN fails every comparison
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        value = float(log_probs[tuple(at)])
        raise ContractError.of(OPERATOR, f"log_probs{at}", "<= 0 and not above rank - 1", value)
