"""``tree_build``: check the contract, then the pure core on a CPU or the kernel on a GPU."""

from __future__ import annotations

import torch

from treeverify.ops.tree_build.contract import DraftTrees, check
from treeverify.ops.tree_build.cpu import tree_build_cpu
from treeverify.ops.tree_build.cuda import tree_build_cuda


def tree_build(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    roots: torch.Tensor,
    *,
    budget: int,
    out: DraftTrees | None = None,
) -> DraftTrees:
    """Build one draft tree per request by best-first search over ranked candidates, bit-equal to ``tree.build``.

    Args:
        log_probs: ``[batch, depth, k]`` float32, <= 0 and not rising along k; -inf is never drafted. depth <= 32,
            k <= 256 (0 of either: the root alone).
        token_ids: ``[batch, depth, k]`` int64, the candidates' tokens, as ``draft_topk`` returns both.
        roots: ``[batch]`` int64, the bonus tokens of the step before.
        budget: nodes beside the root, 0..256; ``width`` = budget + 1.
        out: outputs of exactly these sizes; with it a call on a GPU allocates nothing.

    Returns:
        ``out``, or new outputs. Padding of trees that are smaller than the budget: see ``contract``.

    Raises:
        ContractError: before anything is written, naming operator, tensor, expected and got. Values (order of the
            log-probabilities, NaN) are examined on a CPU only; on a GPU a NaN is not drafted.
    """
    checker = check(log_probs, token_ids, roots, budget, out)
    if out is None:
        out = DraftTrees.empty(len(roots), budget + 1, roots.device)
    if checker.on_gpu:
        tree_build_cuda(log_probs, token_ids, roots, out)
    else:
        tree_build_cpu(log_probs, token_ids, roots, budget, out)
    return out
