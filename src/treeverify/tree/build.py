"""Building draft trees: DDTree's best-first search over a factorised draft (arXiv 2604.12989).

Depth ``d`` of the draft has one distribution, whatever the branch, so a node is the tuple of its ranks and its score is
the sum of its ranks' log-probabilities. The rule, to the bit, so that a builder on another device can be compared:

- a score is accumulated from the root in float32: ``score(child) = fl32(score(parent) + log_probs[depth, rank])``;
- nodes are taken in order of falling score, equal scores in order of the lexicographically smaller rank tuple;
- a node's number is its place in that order, so a smaller budget gives a prefix of a larger one.

Because log-probabilities are <= 0 and do not rise with rank, and float32 rounding is monotone, a heap into which each
taken node puts its next sibling and its rank-0 child yields exactly this order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import inf

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import ContractError
from treeverify.tree._arrays import frozen, require_array, require_int
from treeverify.tree.topology import Tree


@dataclass(frozen=True, eq=False, slots=True)
class Candidates:
    """The ranked candidates of each draft depth: row ``d``, column ``r`` is the token of rank ``r`` at depth ``d + 1``.

    ``log_probs`` float32 [depth, k]: <= 0 and not rising along a row; -inf marks a token that is never drafted.
    ``token_ids`` int64 [depth, k], >= 0. Either dimension may be 0 (nothing to draft). Both become read-only copies.
    A row may repeat a token id: both become nodes, and acceptance follows the lower-numbered, likelier one.

    Raises ContractError that names the entry for a NaN, a positive or rising log-probability, or a negative id, and for
    another dtype, rank or shape.
    """

    log_probs: NDArray[np.float32]
    token_ids: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Check the rules."""
        log_probs = frozen(require_array("Candidates", "log_probs", self.log_probs, (np.float32,), ndim=2))
        token_ids = frozen(require_array("Candidates", "token_ids", self.token_ids, (np.int64,), ndim=2))
        if token_ids.shape != log_probs.shape:
            shape = f"{list(log_probs.shape)} (as log_probs)"
            raise ContractError.of("Candidates", "token_ids: shape", shape, list(token_ids.shape))
        # A NaN fails both comparisons.
        if not ((log_probs[:, :1] <= 0).all() and (log_probs[:, 1:] <= log_probs[:, :-1]).all()):
            depth, rank = _first_bad_log_prob(log_probs)
            raise ContractError.of(
                "Candidates", f"log_probs[{depth}, {rank}]", "<= 0 and not above rank - 1", log_probs[depth, rank]
            )
        if token_ids.size and token_ids.min() < 0:
            depth, rank = (int(i) for i in np.argwhere(token_ids < 0)[0])
            raise ContractError.of("Candidates", f"token_ids[{depth}, {rank}]", ">= 0", token_ids[depth, rank])
        object.__setattr__(self, "log_probs", log_probs)
        object.__setattr__(self, "token_ids", token_ids)


def top_candidates(logits: NDArray[np.float32], k: int) -> Candidates:
    """Rank the ``min(k, vocab)`` best tokens of each depth; DDTree asks for ``k = budget``.

    ``logits`` float32 [depth, vocab], any strides, vocab >= 1, depth >= 0. The log-probability is the logit minus the
    logsumexp of its whole row, in float32. Equal logits: the smaller token id has the smaller rank. A logit of -inf
    gets log-probability -inf and is never drafted; a row of nothing else ends the draft before that depth.

    Raises ContractError for a NaN or +inf logit (names depth and token id), ``k < 0``, and another dtype or rank.
    """
    logits = require_array("top_candidates", "logits", logits, (np.float32,), ndim=2)
    logits = np.ascontiguousarray(logits)  # the order of a sum follows the memory; the same values give the same bits
    depth, vocab = logits.shape
    if vocab == 0:
        raise ContractError.of("top_candidates", "logits: vocab", ">= 1", 0)
    k = min(require_int("top_candidates", "k", k), vocab)
    peak = logits.max(axis=1)  # NaN and +inf both reach the maximum
    if not (peak < inf).all():
        row, token = (int(i) for i in np.argwhere(~(logits < inf))[0])
        raise ContractError.of(
            "top_candidates", "logits", "finite or -inf", f"{logits[row, token]} at depth {row}, token id {token}"
        )
    if k == 0:
        return Candidates(np.empty((depth, 0), np.float32), np.empty((depth, 0), np.int64))
    token_ids = _stable_top(logits, k)
    with np.errstate(over="ignore", invalid="ignore"):
        # The sum holds exp(0) = 1, so its logarithm is >= 0 and no log-probability exceeds 0.
        lse = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
        log_probs = np.take_along_axis(logits, token_ids, axis=1) - lse[:, None]
    log_probs[peak == -inf] = -inf
    return Candidates(log_probs, token_ids)


@dataclass(frozen=True, eq=False, slots=True)
class ScoredTree:
    """A best-first tree with the score of each node: float32 [width], 0 for the root, never rising, read-only.

    The first ``n`` nodes are the tree of the smaller budget ``n - 1``.
    """

    tree: Tree
    scores: NDArray[np.float32]


def build_tree(root_token: int, candidates: Candidates, budget: int) -> Tree:
    """Build the DDTree of at most ``budget`` nodes without the root (width <= budget + 1).

    ``root_token`` >= 0 is the bonus token of the step before. The tree is smaller than the budget when the candidates
    are exhausted: ``depth`` levels, ``k`` ranks, nothing with a score of -inf. Budget 0 gives the root alone.
    Fewer than ``min(budget, vocab)`` candidates per depth are allowed and give the best tree over those.

    Raises ContractError for a negative budget or root token. Source: arXiv 2604.12989; score rule: module docstring.
    """
    return build_scored(root_token, candidates, budget).tree


def build_scored(root_token: int, candidates: Candidates, budget: int) -> ScoredTree:
    """As ``build_tree``, with the nodes' scores: a score is the natural logarithm of its path's drafted probability."""
    budget = require_int("build_tree", "budget", budget)
    tokens = [require_int("build_tree", "root_token", root_token)]
    parents = [-1]
    scores = [0.0]
    log_probs = candidates.log_probs[:, :budget].tolist()  # rank r needs r earlier siblings, so r < budget
    token_ids = candidates.token_ids[:, :budget].tolist()
    depth, k = len(log_probs), min(budget, candidates.log_probs.shape[1])
    # A rank tuple as one number, digit `rank + 1` per depth and 0 past the end, compares as the tuple does.
    digit = [(k + 1) ** (depth - 1 - level) for level in range(depth)]
    fl32 = array("f", [0.0])  # storing rounds a double to float32; a sum of two float32 rounds once, correctly
    # (-score, rank tuple, depth - 1, rank, parent): the first two decide, and the second is unique.
    heap: list[tuple[float, int, int, int, int]] = []
    if depth and k and log_probs[0][0] > -inf:
        heap.append((-log_probs[0][0], digit[0], 0, 0, 0))
    while heap and len(tokens) <= budget:
        negated, order, level, rank, parent = heap[0]
        node = len(tokens)
        tokens.append(token_ids[level][rank])
        parents.append(parent)
        scores.append(-negated)
        fl32[0] = scores[parent] + log_probs[level][rank + 1] if rank + 1 < k else -inf
        if (score := fl32[0]) > -inf:
            heapreplace(heap, (-score, order + digit[level], level, rank + 1, parent))
        else:
            heappop(heap)
        if level + 1 < depth:
            fl32[0] = log_probs[level + 1][0] - negated
            if (score := fl32[0]) > -inf:
                heappush(heap, (-score, order + digit[level + 1], level + 1, 0, node))
    tree = Tree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int32))
    return ScoredTree(tree, frozen(np.array(scores, dtype=np.float32)))


def chain_tree(root_token: int, tokens: Iterable[int]) -> Tree:
    """Build the chain root -> tokens[0] -> tokens[1] ... (no tokens: the root alone).

    ``tokens``: integers >= 0, a sequence or an integer array [length]. Raises ContractError for anything else.
    """
    ids = [require_int("chain_tree", f"tokens[{i}]", token) for i, token in enumerate(tokens)]
    column = np.array(ids, dtype=np.int64).reshape(-1, 1)
    return build_tree(root_token, Candidates(np.zeros(column.shape, np.float32), column), budget=len(ids))


def _stable_top(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Token ids int64 [depth, k] of the k largest logits of each row, by falling logit, then by rising id."""
    vocab = logits.shape[1]
    ids: NDArray[np.int64] = np.argpartition(logits, vocab - k, axis=1)[:, vocab - k :].astype(np.int64)
    values = np.take_along_axis(logits, ids, axis=1)
    kth = values.min(axis=1)
    tied = (logits == kth[:, None]).sum(axis=1) > (values == kth[:, None]).sum(axis=1)
    for row in np.flatnonzero(tied):  # a partition picks any of the ties; the smallest ids are wanted
        above = np.flatnonzero(logits[row] > kth[row])
        ids[row] = np.concatenate([above, np.flatnonzero(logits[row] == kth[row])[: k - len(above)]])
    ids.sort(axis=1)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1)


def _first_bad_log_prob(log_probs: NDArray[np.float32]) -> tuple[int, int]:
    bound = np.concatenate([np.zeros_like(log_probs[:, :1]), log_probs[:, :-1]], axis=1)
    depth, rank = np.argwhere(~(log_probs <= bound))[0]
    return int(depth), int(rank)
