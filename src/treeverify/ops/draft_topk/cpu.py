"""``draft_topk`` on a CPU: the pure core ranks all rows of a batch at once."""

from __future__ import annotations

import torch

from treeverify.errors import ContractError
from treeverify.ops.draft_topk.contract import OPERATOR, Ranked, check_values
from treeverify.tree.build import top_candidates


def draft_topk_cpu(logits: torch.Tensor, k: int, out: Ranked) -> None:
    """Rank the rows of checked ``logits`` into ``out``. Raises ``ContractError`` for a NaN or +inf logit."""
    batch, depth, vocab = logits.shape
    try:
        found = top_candidates(logits.reshape(batch * depth, vocab).float().numpy(), k)
    except ContractError:
        check_values(OPERATOR, logits)  # by request and depth, of which the core knows nothing
        raise
    kept = min(k, vocab)
    out.log_probs.fill_(-torch.inf)
    out.token_ids.fill_(0)
    out.log_probs[..., :kept] = torch.tensor(found.log_probs).view(batch, depth, kept)
    out.token_ids[..., :kept] = torch.tensor(found.token_ids).view(batch, depth, kept)
