"""Simulated acceptance, for benchmarks on random weights: SGLang's ``SGLANG_SIMULATE_ACC_LEN``, for a tree.

A random target agrees with no drafter, so each step accepts a path whose length is drawn instead, by SGLang's own rule
(``SGLANG_SIMULATE_ACC_METHOD``): one length per step for the whole batch, as for DFLASH. It is a path of the step's own
tree, so that rows and features are moved as in serving. The texts mean nothing. Only SGLang's variable turns it on; a
warning at the start and ``simulated_acceptance`` in the info query say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

import torch

from treeverify import env
from treeverify.errors import ConfigError
from treeverify.integrations.sglang.names import check_parameters, read
from treeverify.ops.tree_accept.api import tree_accept
from treeverify.ops.tree_accept.contract import NO_NODE, Accepted
from treeverify.ops.tree_build.contract import DraftTrees

_UTILS = "sglang.srt.speculative.spec_utils"
_METHODS = ("match-expected", "multinomial")
_TOKENS = "real-draft-token"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Simulated:
    """Accepts drawn lengths instead of what the target agrees with."""

    length: float
    """Wanted on average, the root counted."""
    draw: Callable[[int], int]
    """The next step's length, between 1 and the number given; on the host, the same on every rank."""

    def accept(self, trees: DraftTrees, samples: torch.Tensor, depth: int) -> Accepted:
        """Walk along first children to the drawn length, or to where the tree ends.

        The outcome is that of ``ops.tree_accept`` with the samples along the path replaced.

        Args:
            trees: of the step, ``[batch, width]``.
            samples: ``[batch, width]`` int64: the target's token after each node; the one after the path is the bonus.
            depth: of the deepest node that may be accepted; paths have depth + 1 columns.
        """
        reach = self.draw(depth + 1) - 1
        width = trees.tokens.shape[1]
        nodes = torch.arange(width, device=samples.device)
        parents = trees.parents.to(torch.int64)
        numbers = torch.where(parents < 0, width, nodes)  # the root and padding are nobody's children
        first = torch.full_like(samples, width).scatter_reduce(1, parents.clamp(min=0), numbers, "amin")
        goes_on = (first < width) & (trees.depths < reach)
        chosen = trees.tokens.gather(1, first.clamp(max=width - 1))
        found = tree_accept(trees.tokens, trees.parents, torch.where(goes_on, chosen, samples), depth=reach)
        return replace(found, path=torch.nn.functional.pad(found.path, (0, depth - reach), value=NO_NODE))


def settings() -> Simulated | None:
    """Return what this process's environment asks of SGLang, None without ``SGLANG_SIMULATE_ACC_LEN``.

    Raises ``ConfigError`` for a method that SGLang does not know; for a token mode other than real-draft-token, since a
    text of one repeated token is no tree's; and for widths by cost, which would learn from what is simulated.
    """
    utils = import_module(_UTILS)
    length = float(read(utils, "SIMULATE_ACC_LEN"))
    if not length > 0:
        return None
    method, tokens = read(utils, "SIMULATE_ACC_METHOD"), read(utils, "SIMULATE_ACC_TOKEN_MODE")
    if method not in _METHODS:
        raise ConfigError(f"SGLANG_SIMULATE_ACC_METHOD: expected one of {', '.join(_METHODS)}; got {method!r}")
    if tokens != _TOKENS:
        raise ConfigError(f"SGLANG_SIMULATE_ACC_TOKEN_MODE: expected {_TOKENS} with DDTREE; got {tokens!r}")
    if env.budget_by_cost():
        raise ConfigError("SGLANG_SIMULATE_ACC_LEN: expected to be unset with KDTREE_BUDGET=auto")
    name = "sample_simulated_acc_len"
    name = name if hasattr(utils, name) else f"_{name}"  # 0.5.17
    check_parameters(f"{_UTILS}.{name}", "simulate_acc_len simulate_acc_method max_len")
    stock = read(utils, name)
    logger.warning(
        "treeverify: SIMULATED ACCEPTANCE of %g tokens a step (SGLANG_SIMULATE_ACC_LEN): texts are not the model's; "
        "for benchmarks only",
        length,
    )
    return Simulated(length, lambda most: int(stock(length, method, most)))
