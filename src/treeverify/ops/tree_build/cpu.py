"""``tree_build`` on a CPU: the pure core, one request after the other."""

from __future__ import annotations

import numpy as np
import torch

from treeverify.errors import ContractError
from treeverify.ops.tree_build.contract import DraftTrees, check_values
from treeverify.tree.build import Candidates, build_scored


def tree_build_cpu(
    log_probs: torch.Tensor, token_ids: torch.Tensor, roots: torch.Tensor, budget: int, out: DraftTrees
) -> None:
    """Build the trees of a checked call into ``out``. Raises ``ContractError`` for values out of order."""
    try:
        candidates = [Candidates(*each) for each in zip(log_probs.numpy(), token_ids.numpy(), strict=True)]
    except ContractError:
        check_values(log_probs)  # by request, of which the core knows nothing
        raise
    tokens, parents, depths, scores = (tensor.numpy() for tensor in (out.tokens, out.parents, out.depths, out.scores))
    tokens[:] = roots.numpy()[:, None]
    parents.fill(-1)
    depths.fill(0)
    scores.fill(-np.inf)
    for request, root in enumerate(roots.tolist()):
        found = build_scored(root, candidates[request], budget)
        width = found.tree.width
        tokens[request, :width], parents[request, :width] = found.tree.tokens, found.tree.parents
        depths[request, :width], scores[request, :width] = found.tree.depths, found.scores
        out.widths[request] = width
