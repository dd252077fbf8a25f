"""Walks over a text: how many of its tokens a draft gets right, step by step. Pure numpy; the training scripts use it.

A *label row* says what the target would sample: ``labels[d]`` is the token wanted after depth ``d`` (0 = the root). One
label per depth, whatever the branch, so that a draft can be judged against a text without a forward over the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treeverify.tree.accept import accept
from treeverify.tree.build import Candidates, build_tree, chain_tree
from treeverify.tree.topology import Tree

Ints = NDArray[np.int64]

BUDGETS = (4, 8, 16, 32, 64)
"""Draft nodes beside the root; a smaller budget's tree is a prefix of a larger one's, so the largest is built."""
LONGEST_MATCH = 4
"""Tokens that prompt lookup compares at most."""


def tree_lengths(tree: Tree, labels: Ints, budgets: Sequence[int] = BUDGETS) -> list[int]:
    """Acceptance length (root counted) of ``tree`` cut to each budget, for labels int64 [> tree.max_depth]."""
    path = accept(tree, labels[tree.depths]).path
    return [int(np.count_nonzero(path <= budget)) for budget in budgets]


def draft_lengths(root: int, candidates: Candidates, label_rows: Sequence[Ints]) -> list[list[int]]:
    """Acceptance lengths of the drafter's chain and of each of ``BUDGETS``, one row for each label row."""
    depth = candidates.log_probs.shape[0]
    best = Candidates(candidates.log_probs[:, :1], candidates.token_ids[:, :1])
    chain, tree = build_tree(root, best, depth), build_tree(root, candidates, BUDGETS[-1])
    return [tree_lengths(chain, labels, [depth]) + tree_lengths(tree, labels) for labels in label_rows]


def lookup(ids: Sequence[int], most: int, longest: int = LONGEST_MATCH) -> list[int]:
    """Prompt lookup: up to ``most`` tokens that followed an earlier occurrence of the last tokens of ``ids``.

    The last ``longest`` tokens are looked for, then one fewer, down to one. Of several occurrences the latest that has
    ``most`` tokens behind it is taken, or else the earliest (which has the most). [] if not even one token recurs.
    """
    row = list(ids)
    for size in range(min(longest, len(row) - 1), 0, -1):
        wanted = row[-size:]
        begins = [begin for begin in range(len(row) - size) if row[begin : begin + size] == wanted]
        if begins:
            full = [begin for begin in begins if begin + size + most <= len(row)]
            begin = (full[-1] if full else begins[0]) + size
            return row[begin : begin + most]
    return []


def lookup_lengths(ids: Sequence[int], most: int, label_rows: Sequence[Ints]) -> list[int]:
    """Acceptance length of prompt lookup after ``ids``, whose last token is the root, for each label row."""
    chain = chain_tree(ids[-1], lookup(ids, most))
    return [tree_lengths(chain, labels, [most])[0] for labels in label_rows]


def steps(lengths: Sequence[int]) -> list[int]:
    """Accepted lengths of one text's walk over its starts: begin at the first, go on by what was accepted.

    The last step may reach past the last start; it counts in full.
    """
    taken, place = [], 0
    while place < len(lengths):
        taken.append(int(lengths[place]))
        place += taken[-1]
    return taken


def walk(lengths: NDArray[np.integer]) -> float:
    """Tokens per step of all walks together; lengths [texts, starts]."""
    taken = [length for row in lengths.tolist() for length in steps(row)]
    return sum(taken) / len(taken)


def standard_error(lengths: NDArray[np.integer], draws: int = 1000, seed: int = 0) -> float:
    """Standard error of ``walk`` over the choice of texts: a bootstrap of ``draws`` resamples of whole texts."""
    walks = [steps(row) for row in lengths.tolist()]
    sums = np.array([[sum(taken), len(taken)] for taken in walks], dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(0, len(sums), (draws, len(sums)))
    tokens, count = sums[chosen].sum(axis=1).T
    return float((tokens / count).std())


def repeated(rows: Sequence[Sequence[int]], n: int = 8) -> float:
    """Share of n-grams that occurred before in the same row."""
    total = distinct = 0
    for row in rows:
        grams = [tuple(row[begin : begin + n]) for begin in range(len(row) - n + 1)]
        total, distinct = total + len(grams), distinct + len(set(grams))
    return (total - distinct) / max(1, total)
