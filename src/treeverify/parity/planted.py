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

from treeverify.engine.cache import Cache
from treeverify.engine.engine import Engine
from treeverify.engine.metrics import Metrics
from treeverify.engine.protocols import Drafter, Target
from treeverify.engine.randomness import uniforms
from treeverify.engine.request import Request
from treeverify.engine.step import Ints, Prefix, Stepper
from treeverify.engine.verify import VerifyAttention
from treeverify.errors import ConfigError
from treeverify.tree.law import sample, target_law
from treeverify.tree.topology import Tree

Bug = Callable[[Request, Tree, Ints, NDArray[np.float32], NDArray[np.float32] | None], Ints]
"""(request, tree, samples [width], target logits [width, vocab], draft logits [depth, vocab]) -> samples [width]."""


def plant(engine: Engine, name: str) -> None:
    """Plant the bug ``name`` into ``engine``; ConfigError as `bug`."""
    parts = (engine.target, engine.drafter, engine._cache, engine._attention, engine.metrics)
    engine._stepper = _Planted(bug(name), *parts)


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
    numbers = uniforms(request.seed, request.length, tree.max_depth + 1)
    return sample(target_law(drafts[tree.depths], request.params.law), numbers[tree.depths])


BUGS: dict[str, Bug] = {
    "greedy-fallback": _greedy_fallback,
    "sibling-bias": _sibling_bias,
    "draft-law": _draft_law,
}


def _children(tree: Tree, node: int) -> list[int]:
    tokens: list[int] = tree.tokens[tree.parents == node].tolist()
    return tokens


class _Planted(Stepper):
    """A stepper whose samples pass through a bug; the drafts and trees of the step are kept for it."""

    def __init__(
        self,
        bug: Bug,
        target: Target,
        drafter: Drafter | None,
        cache: Cache,
        attention: VerifyAttention,
        metrics: Metrics,
    ) -> None:
        super().__init__(target, drafter, cache, attention, metrics)
        self._bug = bug
        self._trees: list[Tree] = []
        self._drafts: NDArray[np.float32] | None = None

    def _draft(self, requests: list[Request], prefix: Prefix) -> NDArray[np.float32] | None:
        self._drafts = super()._draft(requests, prefix)
        return self._drafts

    def _verify(
        self, requests: list[Request], trees: list[Tree], prefix: Prefix
    ) -> tuple[torch.Tensor, torch.Tensor, Ints]:
        self._trees = trees
        return super()._verify(requests, trees, prefix)

    def _sample(
        self, requests: list[Request], logits: torch.Tensor, depths: list[NDArray[np.int32]], starts: list[int]
    ) -> list[Ints]:
        samples = super()._sample(requests, logits, depths, starts)
        trees, self._trees = self._trees, []
        if not trees:  # a prefill: the first token is drawn as it should be
            return samples
        rows = logits.view(len(requests), -1, logits.shape[-1]).numpy()
        return [
            self._bug(r, tree, drawn, rows[i, : tree.width], None if self._drafts is None else self._drafts[i])
            for i, (r, tree, drawn) in enumerate(zip(requests, trees, samples, strict=True))
        ]
