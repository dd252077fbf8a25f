"""From the drafter's block to trees: the pure core's, in buffers that never move, alike on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treeverify.ops.tree_build.api import tree_build
from treeverify.step.draft import Head, TreeDraft, front
from treeverify.step.plain import Roots
from treeverify.tree.build import build_tree, top_candidates

BLOCK = 8


class Ranks:
    """A group of two ranks, of which this process plays both: gathers what each would have made."""

    world_size = 2

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def all_gather_into_tensor(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        self.made.append(mine.clone())
        for rank, shard in enumerate(self.made):
            out[rank] = shard


@pytest.mark.parametrize("requests", [1, 3])
def test_trees_are_those_of_the_pure_core(requests: int) -> None:
    vocab, hidden, width = 50, 16, 21
    generator = torch.Generator().manual_seed(requests)
    weight = torch.randn(vocab, hidden, generator=generator)
    states = torch.randn(requests * BLOCK, hidden, generator=generator)
    ids = torch.randint(0, vocab, (requests * BLOCK,), generator=generator)
    draft = TreeDraft(Head(weight, 0, None), BLOCK, width, 1)
    draft.reserve(requests)
    draft(states, ids)
    trees = draft.trees(requests)
    blocks = (states @ weight.T).view(requests, BLOCK, vocab)[:, 1:].numpy()
    for i in range(requests):
        tree = build_tree(int(ids[i * BLOCK]), top_candidates(np.ascontiguousarray(blocks[i]), width - 1), width - 1)
        assert trees.tokens[i].tolist() == tree.tokens.tolist()
        assert trees.parents[i].tolist() == tree.parents.tolist()


def test_a_batch_beyond_the_captured_ones_leaves_their_buffers() -> None:
    weight, states, ids = torch.randn(20, 4), torch.randn(3 * BLOCK, 4), torch.arange(3 * BLOCK)
    draft = TreeDraft(Head(weight, 0, None), BLOCK, 9, 1)
    small = draft.trees(1).tokens
    draft.reserve(3)
    draft(states, ids)
    assert draft.trees(1).tokens.data_ptr() == small.data_ptr()
    assert draft.trees(3).tokens.data_ptr() != small.data_ptr()
    assert draft.trees(3).tokens[:, 0].tolist() == [0, BLOCK, 2 * BLOCK]


def test_two_ranks_build_the_tree_of_one() -> None:
    vocab, hidden, width = 50, 16, 21
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(vocab, hidden, generator=generator)
    states, ids = torch.randn(2 * BLOCK, hidden, generator=generator), torch.arange(2 * BLOCK)
    whole = TreeDraft(Head(weight, 0, None), BLOCK, width, 2)
    whole(states, ids)
    group = Ranks()
    for first in (0, 31):
        part = TreeDraft(Head(weight[first : 31 if first == 0 else vocab], first, group), BLOCK, width, 2)
        if first == 0:
            part._captured.shards.fill_(-(1 << 63))  # the other rank's part is still to come
        part(states, ids)
    assert torch.equal(part.trees(2).tokens, whole.trees(2).tokens)
    assert torch.equal(part.trees(2).parents, whole.trees(2).parents)


def test_the_front_of_a_tree_is_the_tree_of_that_budget() -> None:
    torch.manual_seed(3)
    scores, ids = torch.randn(4, 3, 6).log_softmax(-1).sort(-1, descending=True)
    roots = torch.tensor([3, -1, 5, 0])
    wide = tree_build(scores, ids, roots.clamp(min=0), budget=6)
    for budget in range(7):
        narrow = tree_build(scores, ids, roots.clamp(min=0), budget=budget)
        cut = front(wide, budget + 1)
        for name in ("tokens", "parents", "depths", "scores", "widths"):
            assert torch.equal(getattr(cut, name), getattr(narrow, name)), (name, budget)
        assert cut.tokens.is_contiguous()
        assert cut.parents.is_contiguous()
    alone = Roots(torch.device("cpu"))
    for requests in (2, 4, 1):  # constants are those of the largest batch so far
        for name in ("tokens", "parents", "depths", "scores", "widths"):
            got = getattr(alone(wide.tokens[:requests, :1].contiguous()), name)
            assert torch.equal(got, getattr(front(wide, 1), name)[:requests]), name
