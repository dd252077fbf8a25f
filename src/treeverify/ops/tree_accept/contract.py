"""The contracts of ``tree_accept`` and ``tree_accept_sampled``: the walk of ``tree.accept`` for a batch.

From the root: while the target's sample at the current node is the token of one of its children, go to that child, the
lowest-numbered one if several carry the token. The first miss is the *bonus* token, the next step's root. The draft's
probabilities play no part, so the output has the target's law for any tree. A path holds at most ``depth + 1`` nodes:
a walk that would go deeper ends there with the sample at its last node as bonus, which is lossless too.

*Greedy*: the samples are given, one per node (the argmax of its logits, say). *Sampled*: the sample at a node of depth
d is drawn from the law of ``tree.law`` (temperature, top-k, top-p, min-p of its request) by inverting the cumulative
law in token-id order at ``uniforms[request, d]``. Nodes at one depth share a number; a walk uses each at most once, so
the law is exact, and plain decoding with the same numbers gives the same tokens (``step.randomness``). A temperature
below 1e-5, or top-k 1, is the argmax, the lowest id of equal logits. A visited node whose logits hold NaN or +inf, or
nothing but -inf, ends the walk with bonus -1, which is no token (a call on a CPU refuses it by name instead).

The kernel's law: weights ``exp((logit - max) / temperature)`` are float32, rounded to multiples of 2^-40 of the largest
and summed as integers, so that the result does not depend on the order of summation: the same tokens on every rank.
Each cumulative probability errs by at most ``LAW_ERROR``, so the kernel and float64 draw different tokens only where a
uniform is that close to a boundary, or where top-p (min-p) decides a token by that little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeverify.errors import ContractError
from treeverify.ops.checks import Checker

OPERATOR, SAMPLED = "tree_accept", "tree_accept_sampled"
MAX_WIDTH, MAX_VOCAB = 257, 1 << 20
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in ``tree.law``."""
LAW_ERROR = 2e-6
"""Bound on the error of a cumulative probability, as a fraction of the whole.

A float32 weight at distance a = (max - logit) / temperature errs, relatively, by a * 3 * 2^-24 (the difference, the
reciprocal of the temperature and the product are rounded once each) + 2^-23 (expf, 1 ulp) + 2^-41 / weight (the
rounding to an integer). Weighted by the law and added up with one sign, the first term is 3 * 2^-24 times the mean of
a, which for a vocabulary of 2^20 is at most ln(2^20) = 13.9: 2.5e-6 if all errors leaned to one side. They shift the
numerator and the total alike, so what is left is at most half of it: 1.3e-6; plus half of 2^-23 = 0.06e-6, and
2^20 * 2^-41 = 0.5e-6 for the integers at the very largest vocabulary: below 2e-6.
"""
NO_NODE, NO_TOKEN = -1, -1
_GROUP_ELEMENTS = 98_832 // 8
"""Workspace of one request's blocks, in int64."""


@dataclass(frozen=True, eq=False)
class Accepted:
    """The outcome of a step for a batch."""

    path: torch.Tensor
    """``[batch, depth+1]`` int32: accepted nodes, rising, root first; then -1."""
    lengths: torch.Tensor
    """``[batch]`` int32: nodes on the path, >= 1: the acceptance length, and the number of new tokens."""
    new_tokens: torch.Tensor
    """``[batch, width]`` int64: the tokens of the path after the root, then the bonus; then -1. Flattened it is what
    SGLang calls ``next_token_ids``."""
    bonus: torch.Tensor
    """``[batch]`` int64: the last new token, the root of the next tree."""

    @classmethod
    def empty(cls, batch: int, width: int, depth: int, device: torch.device | str) -> Accepted:
        """Unwritten outputs for ``batch`` trees of ``width`` nodes and paths of up to ``depth + 1``."""
        return cls(
            torch.empty(batch, depth + 1, dtype=torch.int32, device=device),
            torch.empty(batch, dtype=torch.int32, device=device),
            torch.empty(batch, width, dtype=torch.int64, device=device),
            torch.empty(batch, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, eq=False)
class LawTensors:
    """How each request samples; on the device, so that a captured graph follows changes. Ranges as ``tree.LawParams``.

    Values out of range are refused on a CPU; the kernel takes top_k < 1 and a temperature below 1e-5 (or NaN) as
    greedy, top_p > 1 as 1.
    """

    temperature: torch.Tensor
    """``[batch]`` float32, >= 0."""
    top_k: torch.Tensor
    """``[batch]`` int32, >= 1; the vocabulary's size or more is off (SGLang's 1 << 30)."""
    top_p: torch.Tensor
    """``[batch]`` float32 in (0, 1]; 1 is off."""
    min_p: torch.Tensor
    """``[batch]`` float32 in [0, 1]; 0 is off."""


def workspace_elements(batch: int) -> int:
    """Int64 elements of workspace that a sampled call on a GPU needs."""
    return batch * _GROUP_ELEMENTS


def check(
    tokens: torch.Tensor, parents: torch.Tensor, samples: torch.Tensor, depth: int, out: Accepted | None
) -> Checker:
    """Check a greedy call (see ``api.tree_accept``); raises ``ContractError``. Reads no value of a tensor."""
    checker = _check_trees(OPERATOR, tokens, parents, depth, out)
    batch, width = tokens.shape
    checker.tensor("samples", samples, (torch.int64,), (batch, width))
    return checker


def check_sampled(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    logits: torch.Tensor,
    law: LawTensors,
    uniforms: torch.Tensor,
    out: Accepted | None,
    workspace: torch.Tensor | None = None,
) -> Checker:
    """Check a sampled call (see ``api.tree_accept_sampled``); raises ``ContractError``. Reads no value of a tensor."""
    if not isinstance(uniforms, torch.Tensor) or uniforms.ndim != 2:
        got = list(uniforms.shape) if isinstance(uniforms, torch.Tensor) else type(uniforms).__name__
        raise Checker.of(SAMPLED, "tokens", tokens).refuse("uniforms", "[batch, depth+1]", got)
    checker = _check_trees(SAMPLED, tokens, parents, uniforms.shape[1] - 1, out)
    batch, width = tokens.shape
    checker.rows("logits", logits, (torch.float32, torch.bfloat16), (batch * width, None))
    checker.integer("logits: dimension 1 (vocab)", logits.shape[1], 1, MAX_VOCAB)
    checker.tensor("uniforms", uniforms, (torch.float64,), (batch, uniforms.shape[1]))
    for name, dtype in (
        ("temperature", torch.float32),
        ("top_k", torch.int32),
        ("top_p", torch.float32),
        ("min_p", torch.float32),
    ):
        checker.tensor(f"law.{name}", getattr(law, name), (dtype,), (batch,))
    if workspace is not None:
        checker.tensor("workspace", workspace, (torch.int64,), (None,))
        least = workspace_elements(batch)
        if checker.on_gpu and workspace.shape[0] < least:
            raise checker.refuse("workspace: dimension 0", f">= {least}", workspace.shape[0])
    return checker


def _check_trees(
    operator: str, tokens: torch.Tensor, parents: torch.Tensor, depth: int, out: Accepted | None
) -> Checker:
    checker = Checker.of(operator, "tokens", tokens)
    checker.tensor("tokens", tokens, (torch.int64,), (None, None))
    batch, width = tokens.shape
    checker.integer("tokens: dimension 1 (width)", width, 1, MAX_WIDTH)
    checker.tensor("parents", parents, (torch.int32,), (batch, width))
    checker.integer("depth", depth, 0, MAX_WIDTH - 1)
    if out is not None:
        checker.tensor("out.path", out.path, (torch.int32,), (batch, depth + 1))
        checker.tensor("out.lengths", out.lengths, (torch.int32,), (batch,))
        checker.tensor("out.new_tokens", out.new_tokens, (torch.int64,), (batch, width))
        checker.tensor("out.bonus", out.bonus, (torch.int64,), (batch,))
    return checker


def check_values(law: LawTensors, uniforms: torch.Tensor) -> None:
    """Check the values of a sampled call on a CPU; raises ``ContractError`` for one out of range."""
    ranges = {
        "law.temperature": (law.temperature, (law.temperature >= 0) & (law.temperature < torch.inf), "finite, >= 0"),
        "law.top_k": (law.top_k, law.top_k >= 1, ">= 1"),
        "law.top_p": (law.top_p, (law.top_p > 0) & (law.top_p <= 1), "in (0, 1]"),
        "law.min_p": (law.min_p, (law.min_p >= 0) & (law.min_p <= 1), "in [0, 1]"),
        "uniforms": (uniforms, (uniforms >= 0) & (uniforms < 1), "in [0, 1)"),
    }
    for name, (tensor, good, expected) in ranges.items():
        if not bool(good.all()):
            at = (~good).nonzero()[0].tolist()
            raise ContractError.of(SAMPLED, f"{name}{at}", expected, tensor[tuple(at)].item())


def check_samples(samples: torch.Tensor) -> None:
    """Check the values of a greedy call on a CPU; raises ``ContractError`` for a negative sample."""
    if bool((samples < 0).any()):
        at = (samples < 0).nonzero()[0].tolist()
        raise ContractError.of(OPERATOR, f"samples{at}", ">= 0", int(samples[tuple(at)]))
