"""Plain steps, several in a row: what they are made of, and how they look to who expects a tree.

A model that takes a millisecond for a token is decoded as fast as the scheduler prepares steps. Where drafting does not
pay, up to ``RUN`` tokens are therefore decoded in one step of the scheduler's. That step is a chain of nodes that are
all accepted: each node's token is what the target gave for the node before.
"""

from __future__ import annotations

import torch

from treeverify.ops.tree_accept.contract import NO_NODE, Accepted
from treeverify.ops.tree_build.contract import DraftTrees

RUN = 4
"""Most plain steps in a row. A request that ends in one of four has the rest computed in vain, 1.5 on average."""


def run_of(block: int) -> int:
    """How many plain steps a drafter's block of ``block`` tokens has columns for."""
    return min(RUN, block)


class Roots:
    """Makes trees of one node, which differ in nothing but the token."""

    def __init__(self, device: torch.device) -> None:
        """Constants are made when they are first needed, and for larger batches."""
        self._same = DraftTrees.empty(0, 1, device)

    def __call__(self, tokens: torch.Tensor) -> DraftTrees:
        """Trees of the roots ``tokens [batch, 1]`` int64, which are not copied."""
        requests = len(tokens)
        if requests > len(self._same.tokens):
            zeros = torch.zeros(requests, 1, dtype=torch.int32, device=tokens.device)
            self._same = DraftTrees(zeros.long(), zeros - 1, zeros, zeros.float(), zeros[:, 0] + 1)
        same = self._same
        return DraftTrees(
            tokens, same.parents[:requests], same.depths[:requests], same.scores[:requests], same.widths[:requests]
        )


class Chains:
    """The accepted chains of runs."""

    def __init__(self, columns: int, device: torch.device | str) -> None:
        """Of paths that have ``columns``."""
        self._columns, self._device = columns, device
        self._places = torch.arange(columns, device=device)
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Paths and lengths of the largest batch so far, by run."""

    def lengths(self, lengths: torch.Tensor, run: int) -> torch.Tensor:
        """Committed tokens ``[run, batch]`` int64 before each step, from those before the first."""
        return lengths + self._places[:run].unsqueeze(1)

    def accepted(self, tokens: torch.Tensor, drawn: bool) -> Accepted:
        """The outcome of a run that gave ``tokens [batch, run]`` int64.

        Where they were ``drawn``, logits of NaN give -1, which is no token: the request ends there, as with a tree, and
        nothing of what was computed after it may be taken for its text.
        """
        requests, run = tokens.shape
        if run not in self._known or requests > len(self._known[run][0]):
            path = torch.full((requests, self._columns), NO_NODE, dtype=torch.int32, device=self._device)
            path[:, :run] = torch.arange(run, device=self._device)
            self._known[run] = path, torch.full((requests,), run, dtype=torch.int32, device=self._device)
        path, lengths = self._known[run]
        path, lengths = path[:requests], lengths[:requests]
        if not drawn:
            return Accepted(path, lengths, tokens, tokens[:, -1].contiguous())
        before = (tokens < 0).cumsum(1)[:, :-1]
        lengths = (before == 0).sum(1, dtype=torch.int32) + 1
        path = torch.where(self._places < lengths.unsqueeze(1), path, NO_NODE)
        return Accepted(path, lengths, tokens, tokens.gather(1, lengths.long().unsqueeze(1) - 1).squeeze(1))
