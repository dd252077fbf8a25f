"""What the tree operators' benchmark checks before it times: every result against the torch references."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from treeverify.errors import ParityError
from treeverify.ops.draft_topk.contract import Ranked, log_prob_error
from treeverify.ops.draft_topk.reference import draft_topk_reference
from treeverify.ops.draft_window.reference import draft_window_reference
from treeverify.ops.feature_gather.reference import feature_gather_reference
from treeverify.ops.tree_accept.reference import tree_accept_reference, tree_accept_sampled_reference
from treeverify.ops.tree_build.reference import tree_build_reference
from treeverify.ops.tree_mask.contract import TreeMasks
from treeverify.ops.tree_mask.reference import tree_mask_reference

if TYPE_CHECKING:
    from treeverify.bench.tree_ops import Workload


def check_all(work: Workload) -> None:
    """Run every operator of ``work`` once and compare. Raises ParityError that names what differs."""
    size, trees = work.size, work.trees
    _spoil(work)
    for shard in range(size.shards):
        work.rank_shard(shard)
    for call in (work.open, work.rank, work.combine, work.build, work.mask, work.accept, work.gather):
        call()
    sizes = {"block": work.window.ids.shape[1], "width": size.budget + 1, "mask_token": size.vocab - 1}
    window = draft_window_reference(work.rows, work.prefixes, work.table, work.roots, **sizes)
    _fields("draft_window", work.window, window)
    want = draft_topk_reference(work.logits, size.budget)
    logits = work.logits.gather(2, want.token_ids)
    for ranked in (work.ranked, work.combined):
        _ranked("draft_topk", ranked, want, logits)
    built = tree_build_reference(work.ranked.log_probs, work.ranked.token_ids, work.roots, budget=size.budget)
    _fields("tree_build", trees, built)
    masks = TreeMasks.empty(size.batch, size.budget + 1, work.device)
    _fields("tree_mask", work.masks, tree_mask_reference(trees.parents, work.prefixes, masks))
    accepted = tree_accept_reference(trees.tokens, trees.parents, work.samples, depth=size.depth)
    _fields("tree_accept", work.accepted, accepted)
    for law in (work.law(0.95), work.law(1.0)):
        work.draw(law)
        drawn = tree_accept_sampled_reference(trees.tokens, trees.parents, work.target, law, work.uniforms)
        _fields("tree_accept_sampled", work.drawn, drawn)
    gathered = feature_gather_reference(work.features, work.path, work.lengths, work.slots, work.prefixes)
    _fields("feature_gather", work.gathered, gathered)
    _compaction(work)


def _spoil(work: Workload) -> None:
    """Overwrite what no operator reads: memory that is used again may hold right results of a run before."""
    for outputs in (work.window, work.combined, work.masks, work.accepted, work.drawn, work.gathered):
        for field in fields(outputs):
            tensor = getattr(outputs, field.name)
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xA5)


def _compaction(work: Workload) -> None:
    nodes = work.path[:, : int(work.lengths[0])].long()
    sources = work.slots.gather(1, nodes).flatten()
    destinations = work.slots[:, : nodes.shape[1]].flatten()
    expected = [buffer.clone() for buffer in work.pools.buffers]
    for buffer in expected:
        buffer[destinations] = buffer[sources]
    work.compact(work.path)
    for layer, (got, want) in enumerate(zip(work.pools.buffers, expected, strict=True)):
        _same(f"kv_compact: layer {layer}", got.view(torch.int16), want.view(torch.int16))


def _ranked(name: str, got: Ranked, want: Ranked, logits: torch.Tensor) -> None:
    _same(f"{name}: token_ids", got.token_ids, want.token_ids)
    exact = want.log_probs.double()
    bound = log_prob_error(exact, logits) + 2**-24 * exact.abs()  # the reference is rounded to float32
    if not bool(((got.log_probs.double() - exact).abs() <= bound).all()):
        raise ParityError(f"{name}: log_probs differ from float64 by more than their bound")


def _fields(name: str, got: object, want: object) -> None:
    for field, tensor in vars(got).items():
        if tensor is not None:
            _same(f"{name}: {field}", tensor, getattr(want, field))


def _same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got, want):
        raise ParityError(f"{name}: differs from the reference")
