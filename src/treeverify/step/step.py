"""One decode step: the drafter's block, trees, one verify call over all nodes, walk, moved KV rows, kept features.

Nothing waits for the device, so a host may run a step ahead. Where drafting does not pay, a step is a run of plain
ones instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Generic

import torch

from treeverify.ops.kv_compact.api import kv_compact
from treeverify.ops.kv_compact.contract import PoolTable
from treeverify.ops.tree_accept.api import tree_accept, tree_accept_sampled
from treeverify.ops.tree_accept.contract import Accepted, LawTensors
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.ops.tree_mask.api import tree_mask
from treeverify.step.draft import front
from treeverify.step.features import Features
from treeverify.step.host import Batch, Host, Outcome, Result, Verified
from treeverify.step.plain import Chains, Roots
from treeverify.step.randomness import uniforms
from treeverify.step.window import Window

Spent = Callable[[str, float], float]
"""Adds the time since a begin to a stage (``draft``, ``verify``, ``accept``, ``commit``); returns now."""
Publish = Callable[[torch.Tensor], None]
"""Takes the committed tokens ``[batch]`` int64 of a step as soon as they are known, before the step commits them."""
Accept = Callable[[DraftTrees, torch.Tensor, int], Accepted]
"""Accepts in the target's place: trees, its token after each node ``[batch, width]`` int64, depth."""


class Step(Generic[Batch, Result]):
    """One step after another for one host; holds what outlives a step."""

    def __init__(self, host: Host[Batch, Result], block: int, spent: Spent, simulated: Accept | None = None) -> None:
        """``block``: the drafter's tokens, the root among them. ``simulated``: what accepts instead of the target."""
        self.features = Features(host.append)
        self._host, self._spent, self._simulated = host, spent, simulated
        self._depth = block - 1  # of narrower trees too: graphs fix the columns of paths
        self._roots, self._chains = Roots(host.device), Chains(block, host.device)
        self._pools: PoolTable | None = None

    def drafted(self, batch: Batch, publish: Publish | None = None) -> Result:
        """A draft, its trees, and what follows."""
        host, spent, begin = self._host, self._spent, perf_counter()
        window = host.open(batch, drafts=True)
        trees = host.draft(batch, window)
        width = host.width(batch, trees)
        if width != trees.tokens.shape[1]:
            trees = front(trees, width)
        window, begin = window.front(width), spent("draft", begin)
        verified = self._verify(batch, window, trees)
        begin = spent("verify", begin)
        accepted = self._accept(batch, trees, verified.logits, window.lengths, host.law(batch))
        lengths = window.lengths + accepted.lengths
        begin = spent("accept", begin)
        if publish is not None:
            publish(lengths)
            begin = perf_counter()
        self._commit(window, accepted, verified.features)
        spent("commit", begin)
        return host.result(batch, Outcome(width, trees, verified, accepted, lengths))

    def plain(self, batch: Batch, run: int, publish: Publish | None = None) -> Result:
        """``run`` steps of one node each without a draft, the scheduler's own work done once for all of them.

        To the host they are one step that has accepted a chain.
        """
        host, chains, spent, begin = self._host, self._chains, self._spent, perf_counter()
        window = host.open(batch, drafts=False)
        lengths, tokens, given, rows = chains.lengths(window.lengths, run), window.block.ids[:, 0], [], []
        masks = host.masks(window, 1)
        for mask in masks.wanted.values():
            mask.fill_(1)  # a root sees itself; cells of prefixes are not read
        law, begin = host.law(batch), spent("draft", begin)
        for here in window.each(lengths):
            verified = host.verify(batch, here, tokens.unsqueeze(1), replace(masks, positions=here.lengths))
            begin = spent("verify", begin)
            given.append(self.next(batch, tokens, verified.logits, here.lengths, law))
            tokens = given[-1].clamp(min=0)  # -1 is no token
            if verified.features is not None:
                rows.append(verified.features.clone())  # the next step overwrites a graph's output
            begin = spent("accept", begin)
        chain = chains.accepted(torch.stack(given, 1), drawn=law is not None)
        after = window.lengths + chain.lengths
        if publish is not None:
            publish(after)
            begin = perf_counter()
        features = torch.stack(rows, 1).flatten(0, 1) if rows else None
        self._append(window.front(run), chain, features)  # the KV rows are in their places
        spent("commit", begin)
        return host.result(batch, Outcome(run, None, verified, chain, after))

    def next(
        self, batch: Batch, roots: torch.Tensor, logits: torch.Tensor, lengths: torch.Tensor, law: LawTensors | None
    ) -> torch.Tensor:
        """What follows the roots ``[batch]`` by ``logits [batch, vocab]``: int64 ``[batch]``, -1 for none.

        Drawn by ``law`` if there is one; ``lengths`` are committed tokens without the root.
        """
        if law is None:
            return logits.argmax(-1)
        return self._accept(batch, self._roots(roots.unsqueeze(1)), logits, lengths, law).bonus

    def _accept(
        self, batch: Batch, trees: DraftTrees, logits: torch.Tensor, lengths: torch.Tensor, law: LawTensors | None
    ) -> Accepted:
        if self._simulated is not None:
            return self._simulated(trees, logits.argmax(-1).view_as(trees.tokens), self._depth)
        if law is None:
            samples = logits.argmax(-1).view_as(trees.tokens)
            return tree_accept(trees.tokens, trees.parents, samples, depth=self._depth)
        numbers = uniforms(self._host.seeds(batch), lengths, self._depth + 1)
        return tree_accept_sampled(trees.tokens, trees.parents, logits, law, numbers)

    def _verify(self, batch: Batch, window: Window, trees: DraftTrees) -> Verified:
        masks = self._host.masks(window, trees.tokens.shape[1])
        positions = torch.empty(trees.tokens.numel(), dtype=torch.int64, device=trees.tokens.device)
        masks = replace(masks, positions=positions)
        tree_mask(trees.parents, window.lengths, out=masks)
        return self._host.verify(batch, window, trees.tokens, masks)

    def _commit(self, window: Window, accepted: Accepted, features: torch.Tensor | None) -> None:
        """Move the accepted rows of the target's KV to the front; write their features into the drafter's KV."""
        if self._pools is None:
            self._pools = self._host.pools()
        kv_compact(self._pools, window.slots, accepted.path, accepted.lengths)
        self._append(window, accepted, features)

    def _append(self, window: Window, accepted: Accepted, features: torch.Tensor | None) -> None:
        if features is not None:
            self.features(features, accepted, window.slots, window.lengths)
