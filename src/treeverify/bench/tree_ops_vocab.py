"""The two tree operators that read a vocabulary, against the floor and torch: checked, then timed, into records.

``draft_topk`` ranks bfloat16 logits ``[batch, depth, vocab]``; its rivals are ``torch.topk`` with ``torch.logsumexp``.
``tree_accept_sampled`` walks a tree of 33 nodes on float32 logits ``[batch * 33, vocab]`` (normal, deviation 2, and 18
added for the first child's token, which then has a probability of 0.98): most walks visit all depths, and have no rival
in torch. Sampled with top-k off, temperature 1; "top-p" is 0.95, "top-k, top-p" 50 and 0.95.

The floor is the bytes that must be read (for the walk: rows of visited nodes) over the rate of a large copy, measured
in the same rounds. ``copy`` reads and writes as many bytes together. Calls go round through input sets of ``ROTATED``
bytes at least, more than a GPU's cache holds, so inputs come from memory. A variant's replay is a CUDA graph of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from treeverify.bench import record
from treeverify.bench.timing import interleave, make_replay, median
from treeverify.errors import ParityError
from treeverify.ops.draft_topk import contract as ranking
from treeverify.ops.draft_topk.api import draft_topk
from treeverify.ops.draft_topk.reference import draft_topk_reference
from treeverify.ops.tree_accept import contract as accepting
from treeverify.ops.tree_accept.api import tree_accept_sampled
from treeverify.ops.tree_accept.reference import tree_accept_sampled_reference

BENCHMARK = "tree-ops-vocab"
ROTATED = 160 << 20
"""Bytes of input that the calls of one replay read, at least."""
COPIED = 1 << 28
"""Elements (bfloat16) of the large copy that measures the rate."""
_MIN_CALLS = 8
_PEAK = 18.0

Calls = list[Callable[[], object]]


@dataclass(frozen=True)
class Ranking:
    """Sizes of one point of ``draft_topk``."""

    batch: int
    vocab: int
    k: int
    depth: int = 7


@dataclass(frozen=True)
class Walk:
    """Sizes of one point of ``tree_accept_sampled``; the tree is binary, of ``nodes`` nodes."""

    batch: int
    vocab: int
    nodes: int = 33


@dataclass(frozen=True)
class Rotated:
    """One variant's calls, in the order of a replay, and the bytes that one of them must read."""

    calls: Calls
    bytes: float


POINTS: tuple[Ranking | Walk, ...] = (
    *(Ranking(batch, vocab, k) for vocab in (32_768, 151_936, 163_840) for batch in (1, 4, 16) for k in (8, 64)),
    *(Walk(batch, 163_840) for batch in (1, 16)),
)


def ranking_variants(size: Ranking, device: torch.device) -> dict[str, Rotated]:
    """Check ``draft_topk`` on two input sets, then return what is timed, by name. Raises ``ParityError``."""
    shape = (size.batch, size.depth, size.vocab)
    need = 2 * math.prod(shape)
    count = max(_MIN_CALLS, -(-ROTATED // need))
    logits = [(torch.randn(shape, device=device) * 3).bfloat16() for _ in range(count)]
    out = ranking.Ranked.empty(size.batch, size.depth, size.k, device)
    elements = ranking.workspace_elements(*shape, size.k)
    workspace = torch.empty(elements, dtype=torch.int64, device=device)

    def ours(one: torch.Tensor) -> None:
        draft_topk(one, size.k, out=out, workspace=workspace)

    def rival(one: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = torch.topk(one, size.k, dim=-1)
        return best.values.float() - torch.logsumexp(one.float(), dim=-1, keepdim=True), best.indices

    for one in logits[:2]:
        ours(one)
        _check_ranked(out, one, size.k)
    return {
        "draft_topk": _each(ours, logits, need),
        "torch.topk, logsumexp": _each(rival, logits, need),
        "copy": Rotated([_copy_of_half(one) for one in logits], need),
    }


def walk_variants(size: Walk, device: torch.device) -> dict[str, Rotated]:
    """The same for ``tree_accept_sampled``, checked for each law on one input set. Raises ``ParityError``."""
    batch, nodes = size.batch, size.nodes
    depth = nodes.bit_length() - 1
    tokens = torch.arange(nodes, device=device).repeat(batch, 1)
    parents = ((torch.arange(nodes, dtype=torch.int32, device=device) - 1) // 2).repeat(batch, 1)
    children = (2 * torch.arange(nodes, device=device) + 1).clamp(max=nodes - 1).repeat(batch)
    count = max(_MIN_CALLS // 4, -(-ROTATED // (4 * batch * size.vocab * depth)))
    logits = [torch.randn(batch * nodes, size.vocab, device=device) * 2 for _ in range(count)]
    for one in logits:
        one[torch.arange(batch * nodes, device=device), children] += _PEAK
    uniforms = torch.rand(batch, depth + 1, dtype=torch.float64, device=device)
    workspace = torch.empty(accepting.workspace_elements(batch), dtype=torch.int64, device=device)
    variants = {}
    for name, top_k, top_p in (("", 1 << 30, 1.0), (", top-p", 1 << 30, 0.95), (", top-k, top-p", 50, 0.95)):
        law = accepting.LawTensors(
            torch.ones(batch, device=device),
            torch.full((batch,), top_k, dtype=torch.int32, device=device),
            torch.full((batch,), top_p, device=device),
            torch.zeros(batch, device=device),
        )
        out = accepting.Accepted.empty(batch, nodes, depth, device)

        def walk(one: torch.Tensor, law: accepting.LawTensors = law, out: accepting.Accepted = out) -> None:
            tree_accept_sampled(tokens, parents, one, law, uniforms, out=out, workspace=workspace)

        visited = 0
        for one in logits:
            walk(one)
            visited += int(out.lengths.sum())
        want = tree_accept_sampled_reference(tokens, parents, logits[-1], law, uniforms)
        for field, tensor in vars(out).items():
            if not torch.equal(tensor, getattr(want, field)):
                raise ParityError(f"tree_accept_sampled{name}: {field} differs from the reference")
        variants[f"tree_accept_sampled{name}"] = _each(walk, logits, 4 * size.vocab * visited / count)
    return variants


def run_point(size: Ranking | Walk, device: torch.device, output: Path, rounds: int, commit: str | None) -> None:
    """Check, time all variants in interleaved rounds, append a record for each. Raises ``ParityError``."""
    torch.manual_seed(0)
    variants = ranking_variants(size, device) if isinstance(size, Ranking) else walk_variants(size, device)
    large = torch.randn(COPIED if device.type == "cuda" else 1 << 12, device=device).bfloat16()
    variants["large copy"] = Rotated([_copy_of_half(large)], 2 * large.numel())
    replays = {name: make_replay(variant.calls, device) for name, variant in variants.items()}
    runs = interleave(replays, rounds)
    rate = variants["large copy"].bytes / median(runs["large copy"])
    for name, times in runs.items():
        _record(name, variants[name], times, rate, size, output, commit)


def _record(
    name: str, variant: Rotated, times: list[float], rate: float, size: Ranking | Walk, output: Path, commit: str | None
) -> None:
    us, floor = median(times), variant.bytes / rate
    measures: Mapping[str, object] = {
        "us": round(us, 3), "us_runs": [round(one, 3) for one in times], "bytes": round(variant.bytes),
        "floor_us": round(floor, 3), "ratio": round(us / floor, 2), "calls": len(variant.calls),
    }  # fmt: skip
    entry = {"benchmark": BENCHMARK, "impl": name, "case": asdict(size), "measures": measures}
    record.append(output, entry | record.environment(commit=commit))
    print(f"{size}  {name:32}{us:>9.2f} us, floor {floor:>8.2f}, ratio {us / floor:.2f}", flush=True)


def _each(call: Callable[[torch.Tensor], object], inputs: list[torch.Tensor], need: float) -> Rotated:
    return Rotated([lambda one=one: call(one) for one in inputs], need)  # type: ignore[misc]


def _copy_of_half(one: torch.Tensor) -> Callable[[], object]:
    """A call that reads half of ``one`` and writes as much."""
    half = one.view(-1)[: one.numel() // 2]
    target = torch.empty_like(half)
    return lambda: target.copy_(half)


def _check_ranked(out: ranking.Ranked, logits: torch.Tensor, k: int) -> None:
    want = draft_topk_reference(logits, k)
    if not torch.equal(out.token_ids, want.token_ids):
        raise ParityError("draft_topk: token_ids differ from the reference")
    exact = want.log_probs.double()
    bound = ranking.log_prob_error(exact, logits.gather(2, want.token_ids)) + 2**-24 * exact.abs()
    if not bool(((out.log_probs.double() - exact).abs() <= bound).all()):
        raise ParityError("draft_topk: log_probs differ from float64 by more than their bound")
