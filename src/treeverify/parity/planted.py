"""Three bugs that speculative samplers have had, planted into an engine: each must be found by the test of the law.

- ``greedy-fallback``: the walk goes on to the likeliest token if that is drafted, and draws only where it ends;
- ``sibling-bias``: a draw that is none of the children takes the first child instead of ending the walk;
- ``draft-law``: tokens are drawn from the drafter's law of their depth instead of the target's.

Each replaces the samples that the engine's own acceptance then walks by; everything else is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from treeverify.engine.engine import Engine
from treeverify.engine.host import Batch, EngineHost
from treeverify.engine.request import Request
from treeverify.errors import ConfigError
from treeverify.ops.tree_accept.api import tree_accept
from treeverify.ops.tree_accept.contract import Accepted, LawTensors
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.step.randomness import uniforms
from treeverify.step.step import Step
from treeverify.step.window import Window
from treeverify.tree.law import sample, target_law
from treeverify.tree.topology import Tree

Ints = NDArray[np.int64]
Bug = Callable[[Request, Tree, Ints, NDArray[np.float32], NDArray[np.float32] | None], Ints]
"""(request, tree, samples [width], target logits [width, vocab], draft logits [depth, vocab]) -> samples [width]."""


def plant(engine: Engine, name: str) -> None:
    """Plant the bug ``name`` into ``engine``; ConfigError as `bug`."""
    stepper, drafter = engine._stepper, engine.drafter
    assert drafter is not None
    stepper.step = _Planted(bug(name), stepper.host, drafter.depth)


def bug(name: str) -> Bug:
    """The bug of that name; ConfigError that lists them for another one."""
    if name not in BUGS:
        raise ConfigError(f"plant: expected one of {', '.join(BUGS)}; got {name!r}")
    return BUGS[name]


def _greedy_fallback(
    request: Request, tree: Tree, samples: Ints, logits: NDArray[np.float32], drafts: NDArray[np.float32] | None
) -> Ints:
    best = logits.argmax(axis=1)
    return np.array([best[n] if best[n] in _children(tree, n) else samples[n] for n in range(tree.width)])


def _sibling_bias(
    request: Request, tree: Tree, samples: Ints, logits: NDArray[np.float32], drafts: NDArray[np.float32] | None
) -> Ints:
    biased = samples.copy()
    for node in range(tree.width):
        children = _children(tree, node)
        if children and samples[node] not in children:
            biased[node] = children[0]
    return biased


def _draft_law(
    request: Request, tree: Tree, samples: Ints, logits: NDArray[np.float32], drafts: NDArray[np.float32] | None
) -> Ints:
    if drafts is None:
        return samples
    return sample(target_law(drafts[tree.depths], request.params.law), _numbers(request, tree))


BUGS: dict[str, Bug] = {
    "greedy-fallback": _greedy_fallback,
    "sibling-bias": _sibling_bias,
    "draft-law": _draft_law,
}


def _numbers(request: Request, tree: Tree) -> NDArray[np.float64]:
    """The random number of each node, float64 [width]."""
    first = torch.tensor([request.committed])
    return uniforms(torch.tensor([request.seed]), first, tree.max_depth + 1)[0].numpy()[tree.depths]


def _children(tree: Tree, node: int) -> list[int]:
    tokens: list[int] = tree.tokens[tree.parents == node].tolist()
    return tokens


class _Planted(Step[Batch, list[list[int]]]):
    """A step whose samples pass through a bug; the logits that its trees were drafted from are kept for it."""

    def __init__(self, bug: Bug, host: EngineHost, depth: int) -> None:
        super().__init__(host, depth + 1, host.metrics.spent)
        self._bug, self._drafter = bug, host.draft_logits
        self._drafts: NDArray[np.float32] | None = None
        host.draft_logits = self._noted  # type: ignore[method-assign]

    def _noted(self, batch: Batch, window: Window) -> torch.Tensor:
        found = self._drafter(batch, window)
        self._drafts = found.numpy()
        return found

    def _accept(
        self, batch: Batch, trees: DraftTrees, logits: torch.Tensor, lengths: torch.Tensor, law: LawTensors | None
    ) -> Accepted:
        nodes = trees.tokens.shape[1]
        if nodes == 1:  # a prefill: the first token is drawn as it should be
            return super()._accept(batch, trees, logits, lengths, law)
        samples = logits.argmax(-1).view_as(trees.tokens)
        rows = logits.view(len(batch.requests), nodes, -1).numpy()
        for row, (request, width) in enumerate(zip(batch.requests, trees.widths.tolist(), strict=True)):
            tree = Tree(trees.tokens[row, :width].numpy(), trees.parents[row, :width].numpy())
            drawn = sample(target_law(rows[row, :width], request.params.law), _numbers(request, tree))
            drafts = None if self._drafts is None else self._drafts[row]
            samples[row, :width] = torch.from_numpy(self._bug(request, tree, drawn, rows[row, :width], drafts))
        return tree_accept(trees.tokens, trees.parents, samples, depth=self._depth)
