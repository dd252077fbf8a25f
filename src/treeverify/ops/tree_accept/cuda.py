"""The compiled walks: pass the buffers to the library; no arithmetic, no allocation, no wait."""

from __future__ import annotations

import torch

from treeverify.ops import compiled
from treeverify.ops.tree_accept.contract import Accepted, LawTensors


def tree_accept_cuda(tokens: torch.Tensor, parents: torch.Tensor, samples: torch.Tensor, out: Accepted) -> None:
    """Launch on torch's current stream; arguments as in ``api.tree_accept``. Raises ``ValueError``, ``BuildError``."""
    run = compiled.function("tree_accept", tokens.device)
    run(tokens, parents, samples, out.path, out.lengths, out.new_tokens, out.bonus)


def tree_accept_sampled_cuda(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    logits: torch.Tensor,
    law: LawTensors,
    uniforms: torch.Tensor,
    workspace: torch.Tensor,
    out: Accepted,
) -> None:
    """As `tree_accept_cuda`, for ``api.tree_accept_sampled``."""
    run = compiled.function("tree_accept_sampled", tokens.device)
    law_tensors = (law.temperature, law.top_k, law.top_p, law.min_p)
    run(tokens, parents, logits, *law_tensors, uniforms, workspace, out.path, out.lengths, out.new_tokens, out.bonus)
