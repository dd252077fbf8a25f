"""One step of all tree operators as a captured graph: replays, padding, no allocation, no wait, the right stream.

Covers F6, F7, F8 and F20 of the field faults for these operators. Needs a GPU, no pytest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tree_cases import equal

import treeverify
from treeverify.ops import compiled
from treeverify.ops.draft_topk.contract import Ranked, workspace_elements
from treeverify.ops.draft_window.contract import DraftWindow
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.kv_compact.contract import PoolTable
from treeverify.ops.tree_accept import contract as accept_contract
from treeverify.ops.tree_accept.contract import Accepted, LawTensors
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.ops.tree_mask.contract import TreeMasks


@dataclass(frozen=True)
class Shape:
    """What a captured graph fixes."""

    batch: int
    budget: int
    depth: int = 7
    vocab: int = 9000
    layers: int = 3
    slots: int = 4096
    sampled: bool = False


class Step:
    """Static inputs and outputs of one step, on any device."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        batch, width, depth = shape.batch, shape.budget + 1, shape.depth
        self.logits = torch.zeros(batch, depth, shape.vocab, device=device)
        self.roots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.prefixes = torch.zeros(batch, dtype=torch.int64, device=device)
        self.target = torch.zeros(batch * width, shape.vocab, device=device)
        self.samples = torch.zeros(batch, width, dtype=torch.int64, device=device)
        self.law = LawTensors(
            torch.ones(batch, device=device),
            torch.full((batch,), 1 << 30, dtype=torch.int32, device=device),
            torch.ones(batch, device=device),
            torch.zeros(batch, device=device),
        )
        self.uniforms = torch.zeros(batch, depth + 1, dtype=torch.float64, device=device)
        self.slots = torch.zeros(batch, width, dtype=torch.int64, device=device)
        self.features = torch.zeros(batch * width, 40, dtype=torch.bfloat16, device=device)
        self.pools = [torch.zeros(shape.slots, 1, 64, dtype=torch.bfloat16, device=device) for _ in range(shape.layers)]
        self.table = PoolTable.of(self.pools)
        self.workspace = torch.empty(workspace_elements(batch, depth, shape.vocab, shape.budget), dtype=torch.int64)
        self.workspace = self.workspace.to(device)
        draws = accept_contract.workspace_elements(batch)
        self.draw_workspace = torch.empty(draws, dtype=torch.int64, device=device)
        self.ranked = Ranked.empty(batch, depth, shape.budget, device)
        self.trees = DraftTrees.empty(batch, width, device)
        self.rows = torch.arange(batch, device=device)
        self.slot_table = torch.arange(batch * 1200, dtype=torch.int32, device=device).view(batch, 1200)
        self.window = DraftWindow.empty(batch, min(depth + 1, width), width, device)
        self.masks = TreeMasks.empty(batch, width, device)
        self.accepted = Accepted.empty(batch, width, depth, device)
        self.gathered = Gathered.empty(batch, depth, self.features)

    def run(self) -> None:
        """The operators of a step, in their order."""
        sizes = {"block": self.window.ids.shape[1], "width": self.shape.budget + 1, "mask_token": 3}
        treeverify.draft_window(self.rows, self.prefixes, self.slot_table, self.roots, **sizes, out=self.window)
        treeverify.draft_topk(self.logits, self.shape.budget, out=self.ranked, workspace=self.workspace)
        self.run_after_ranking()

    def run_after_ranking(self) -> None:
        treeverify.tree_build(
            self.ranked.log_probs, self.ranked.token_ids, self.roots, budget=self.shape.budget, out=self.trees
        )
        tokens, parents = self.trees.tokens, self.trees.parents
        treeverify.tree_mask(parents, self.prefixes, out=self.masks)
        if self.shape.sampled:
            given = (tokens, parents, self.target, self.law, self.uniforms)
            treeverify.tree_accept_sampled(*given, out=self.accepted, workspace=self.draw_workspace)
        else:
            treeverify.tree_accept(tokens, parents, self.samples, depth=self.shape.depth, out=self.accepted)
        path, lengths = self.accepted.path, self.accepted.lengths
        treeverify.kv_compact(self.table, self.slots, path, lengths)
        treeverify.feature_gather(self.features, path, lengths, self.slots, self.prefixes, out=self.gathered)

    def load(self, seed: int, live: int) -> None:
        """New inputs for ``live`` requests; the rest is padding: NaN logits, junk samples, the dummy slot."""
        random = torch.Generator().manual_seed(seed)
        shape, width = self.shape, self.shape.budget + 1
        few = 3  # tokens that drafts and samples agree on often
        logits = torch.randn(shape.batch, shape.depth, shape.vocab, generator=random)
        logits[..., :few] += 9
        logits[live:] = torch.nan
        target = torch.randn(shape.batch * width, shape.vocab, generator=random)
        target[:, :few] += 9
        samples = torch.randint(0, few, (shape.batch, width), generator=random)
        samples[live:] = -(2**40)
        slots = torch.randperm(shape.slots - 1, generator=random)[: shape.batch * width].view(shape.batch, width) + 1
        slots[live:] = 0
        self.logits.copy_(logits)
        self.target.copy_(target)
        self.samples.copy_(samples)
        self.slots.copy_(slots)
        self.roots.copy_(torch.randint(0, few, (shape.batch,), generator=random))
        self.prefixes.copy_(torch.randint(0, 1000, (shape.batch,), generator=random))
        self.uniforms.copy_(torch.rand(self.uniforms.shape, generator=random, dtype=torch.float64))
        self.features.copy_(torch.randn(self.features.shape, generator=random))
        for pool in self.pools:
            pool.view(torch.int16).copy_(torch.randint(-(2**15), 2**15, pool.shape, generator=random))

    def outputs(self) -> dict[str, torch.Tensor]:
        """Every tensor that a step writes, by name."""
        found = {"bits": self.masks.bits, "positions": self.masks.positions.view(self.shape.batch, -1)}
        for made in (self.window, self.ranked, self.trees, self.accepted, self.gathered):
            found |= {f"{type(made).__name__}.{name}": tensor for name, tensor in vars(made).items()}
        return found

    def poison(self) -> None:
        for tensor in self.outputs().values():
            tensor.contiguous().view(torch.uint8).fill_(0xA5)


def agrees_with_the_reference(step: Step, seed: int, live: int) -> None:
    """The device's step against the same step by the references on the CPU, live requests only."""
    twin = Step(Shape(**{**vars(step.shape), "batch": live}), torch.device("cpu"))
    width = step.shape.budget + 1
    for name in ("logits", "roots", "prefixes", "samples", "uniforms", "slots"):
        getattr(twin, name).copy_(getattr(step, name)[:live])
    for name in ("target", "features"):
        getattr(twin, name).copy_(getattr(step, name)[: live * width])
    whole = Step(step.shape, torch.device("cpu"))
    whole.load(seed, live)
    for mine, pool in zip(twin.pools, whole.pools, strict=True):
        mine.copy_(pool)
    sizes = {"block": twin.window.ids.shape[1], "width": width, "mask_token": 3}
    treeverify.draft_window(twin.rows, twin.prefixes, twin.slot_table, twin.roots, **sizes, out=twin.window)
    treeverify.draft_topk(twin.logits, twin.shape.budget, out=twin.ranked)
    error = float((step.ranked.log_probs[:live].cpu() - twin.ranked.log_probs).abs().max())
    assert error < 1e-4, f"log-probabilities differ by {error}"  # the bound itself: check_topk
    twin.ranked.log_probs.copy_(step.ranked.log_probs[:live])  # trees follow scores bit for bit, so these must agree
    twin.run_after_ranking()
    for name, tensor in twin.outputs().items():
        equal(name, step.outputs()[name][:live], tensor)
    for layer, (mine, pool) in enumerate(zip(step.pools, twin.pools, strict=True)):
        equal(f"pool {layer}", mine[1:].view(torch.int16), pool[1:].view(torch.int16))  # but for the dummy slot


def captured(step: Step) -> torch.cuda.CUDAGraph:
    compiled.prepare(step.device)
    step.load(0, step.shape.batch)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph


def replays_follow_the_live_batch(device: torch.device) -> None:
    for shape in (Shape(4, 33), Shape(4, 16, sampled=True), Shape(32, 9), Shape(1, 64), Shape(2, 100, depth=15)):
        step = Step(shape, device)
        graph = captured(step)
        batches = (32, 12, 32) if shape.batch == 32 else (max(1, shape.batch - 1), 1, shape.batch)
        for seed, live in enumerate(batches, start=1):
            step.load(seed, live)
            step.poison()
            graph.replay()
            agrees_with_the_reference(step, seed, live)


def nothing_is_allocated_and_nobody_waits(device: torch.device) -> None:
    for sampled in (False, True):
        step = Step(Shape(4, 32, sampled=sampled), device)
        step.load(1, 4)
        step.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "a call allocated"


def launches_go_to_the_current_stream(device: torch.device) -> None:
    step = Step(Shape(4, 32), device)
    step.load(1, 4)
    step.run()
    torch.cuda.synchronize()
    step.poison()
    torch.cuda.synchronize()
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # about 10 ms: a launch on any other stream would finish before it
        step.run()
    torch.cuda.current_stream().synchronize()
    untouched = step.accepted.lengths.view(torch.uint8)
    assert side.query() or bool((untouched == 0xA5).all()), "launched on another stream"
    side.synchronize()
    assert bool((step.accepted.lengths > 0).all())


def the_same_bits_every_time(device: torch.device) -> None:
    """A hundred runs of one step: atomics and block order must not show."""
    for sampled in (False, True):
        step = Step(Shape(4, 48, vocab=40_000, sampled=sampled), device)
        step.load(5, 4)
        pools = [pool.clone() for pool in step.pools]
        first: dict[str, torch.Tensor] = {}
        for _ in range(100):
            step.poison()
            for pool, kept in zip(step.pools, pools, strict=True):
                pool.copy_(kept)
            step.run()
            for name, tensor in step.outputs().items():
                equal(name, tensor, first.setdefault(name, tensor.cpu().clone()))


CHECKS = {
    check.__name__: check
    for check in (
        replays_follow_the_live_batch,
        nothing_is_allocated_and_nobody_waits,
        launches_go_to_the_current_stream,
        the_same_bits_every_time,
    )
}
