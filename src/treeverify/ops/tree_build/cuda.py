"""The compiled ``tree_build``: passes the buffers to the library; no arithmetic, no allocation, no wait."""

from __future__ import annotations

import torch

from treeverify.ops import compiled
from treeverify.ops.tree_build.contract import DraftTrees


def tree_build_cuda(log_probs: torch.Tensor, token_ids: torch.Tensor, roots: torch.Tensor, out: DraftTrees) -> None:
    """Launch on torch's current stream; arguments as in ``api.tree_build``. Raises ``ValueError``, ``BuildError``."""
    run = compiled.function("tree_build", log_probs.device)
    run(log_probs, token_ids, roots, out.tokens, out.parents, out.depths, out.scores, out.widths)
