"""``draft_topk`` and its halves for vocabulary shards: check, then the kernel on a GPU.

On a CPU the pure core ranks a whole vocabulary; the halves, which no CPU needs, are their references.
"""

from __future__ import annotations

import torch

from treeverify.ops.draft_topk.contract import (
    OPERATOR,
    SHARD,
    Ranked,
    check_logits,
    check_ranked,
    check_shards,
    workspace_elements,
)
from treeverify.ops.draft_topk.cpu import draft_topk_cpu
from treeverify.ops.draft_topk.cuda import draft_topk_combine_cuda, draft_topk_cuda, draft_topk_shard_cuda
from treeverify.ops.draft_topk.reference import (
    draft_topk_combine_reference,
    draft_topk_shard_reference,
)


def draft_topk(
    logits: torch.Tensor, k: int, *, out: Ranked | None = None, workspace: torch.Tensor | None = None
) -> Ranked:
    """Rank the k best tokens of each depth, with log-probabilities over the whole vocabulary.

    Args:
        logits: ``[batch, depth, vocab]`` float32 or bfloat16, rows contiguous, of the whole vocabulary.
        k: candidates per depth, 1..256; DDTree asks for k = budget.
        out: outputs of exactly these sizes.
        workspace: int64, ``contract.workspace_elements(batch, depth, vocab, k)`` of them; unused on a CPU. With
            ``out`` and ``workspace`` a call on a GPU allocates nothing.

    Returns:
        ``out``, or new outputs.

    Raises:
        ContractError: before anything is written, naming operator, tensor, expected and got; a NaN or +inf logit only
            on a CPU, by position (on a GPU its row's log-probabilities are NaN).
    """
    checker = check_logits(OPERATOR, logits, k, workspace)
    batch, depth, _ = logits.shape
    check_ranked(checker, batch, depth, k, out)
    if out is None:
        out = Ranked.empty(batch, depth, k, logits.device)
    if checker.on_gpu:
        draft_topk_cuda(logits, _workspace(logits, k, workspace), out)
    else:
        draft_topk_cpu(logits, k, out)
    return out


def draft_topk_shard(
    logits: torch.Tensor,
    k: int,
    *,
    first_id: int,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rank the k best tokens of each depth among one rank's columns of the vocabulary.

    Args:
        logits: ``[batch, depth, vocab_shard]`` float32 or bfloat16, rows contiguous; padding columns left out.
        k: candidates per depth, 1..256, the same on every rank.
        first_id: global token id of column 0.
        out: ``[batch, depth, k + 1]`` int64.
        workspace: as for `draft_topk`.

    Returns:
        ``out``, or a new tensor: the format is ``contract``'s.

    Raises:
        ContractError: as `draft_topk`.
    """
    checker = check_logits(SHARD, logits, k, workspace, first_id)
    batch, depth, _ = logits.shape
    if out is not None:
        checker.tensor("out", out, (torch.int64,), (batch, depth, k + 1))
    if not checker.on_gpu:
        made = draft_topk_shard_reference(logits, k, first_id=first_id)
        return made if out is None else out.copy_(made)
    if out is None:
        out = torch.empty(batch, depth, k + 1, dtype=torch.int64, device=logits.device)
    draft_topk_shard_cuda(logits, first_id, _workspace(logits, k, workspace), out)
    return out


def draft_topk_combine(shards: torch.Tensor, *, out: Ranked | None = None) -> Ranked:
    """Merge the shards' results into what one shard with the whole vocabulary gives.

    Args:
        shards: ``[shards, batch, depth, k + 1]`` int64, gathered results of `draft_topk_shard`, in any order.
        out: outputs of exactly these sizes; with it a call on a GPU allocates nothing.

    Returns:
        ``out``, or new outputs.

    Raises:
        ContractError: before anything is written, naming operator, tensor, expected and got.
    """
    checker = check_shards(shards, out)
    if not checker.on_gpu:
        return _into(out, draft_topk_combine_reference(shards))
    _, batch, depth, entries = shards.shape
    if out is None:
        out = Ranked.empty(batch, depth, entries - 1, shards.device)
    draft_topk_combine_cuda(shards, out)
    return out


def _workspace(logits: torch.Tensor, k: int, workspace: torch.Tensor | None) -> torch.Tensor:
    if workspace is not None:
        return workspace
    batch, depth, vocab = logits.shape
    return torch.empty(workspace_elements(batch, depth, vocab, k), dtype=torch.int64, device=logits.device)


def _into(out: Ranked | None, made: Ranked) -> Ranked:
    if out is None:
        return made
    out.log_probs.copy_(made.log_probs)
    out.token_ids.copy_(made.token_ids)
    return out
