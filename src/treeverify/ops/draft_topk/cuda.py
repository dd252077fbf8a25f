"""The compiled ranking: passes the buffers to the library; no arithmetic, no allocation, no wait."""

from __future__ import annotations

import torch

from treeverify.ops import compiled
from treeverify.ops.draft_topk.contract import Ranked


def draft_topk_cuda(logits: torch.Tensor, workspace: torch.Tensor, out: Ranked) -> None:
    """Launch on torch's current stream; arguments as in ``api.draft_topk``. Raises ``ValueError``, ``BuildError``."""
    run = compiled.function("draft_topk", logits.device)
    run(logits, workspace, out.log_probs, out.token_ids)


def draft_topk_shard_cuda(logits: torch.Tensor, first_id: int, workspace: torch.Tensor, out: torch.Tensor) -> None:
    """As `draft_topk_cuda`, for ``api.draft_topk_shard``."""
    run = compiled.function("draft_topk_shard", logits.device)
    run(logits, first_id, workspace, out)


def draft_topk_combine_cuda(shards: torch.Tensor, out: Ranked) -> None:
    """As `draft_topk_cuda`, for ``api.draft_topk_combine``."""
    run = compiled.function("draft_topk_combine", shards.device)
    run(shards, out.log_probs, out.token_ids)
