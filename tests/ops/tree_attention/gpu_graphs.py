"""Captured graphs: static buffers as SGLang keeps them, replayed with other lengths, batches, trees and data.

Everything that a replay may not read is poisoned first: unnamed pool rows, the tails of all static buffers, padded
requests' queries and masks. Everything that it must write is poisoned as well.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from cases import SCALE, Case, assert_matches, pack_bits, random_tree
from gpu_kernel import Kernel, assert_guards, exact_on_device, same_bits

from treeverify import tree_attention
from treeverify.ops.tree_attention.contract import RELATIVE_ERROR_FLAT

BF16, ROW = torch.bfloat16, 576
NOWHERE = 2**40  # a slot that faults if it is ever used as an address
EDGES = (0, 0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


@dataclass(frozen=True)
class Shape:
    """What a captured graph fixes."""

    batch: int
    nodes: int
    heads: int
    form: str = "mask"
    slots: int = 8192


class CapturedCall:
    """One graph and its static buffers."""

    def __init__(self, kernel: Kernel, shape: Shape, seed: int = 0) -> None:
        self.kernel, self.shape, device = kernel, shape, kernel.device
        self.random = random.Random(seed)
        self.host = torch.Generator().manual_seed(seed)
        batch, nodes, heads = shape.batch, shape.nodes, shape.heads
        tokens, self.cells = batch * nodes, nodes * (shape.slots + batch * nodes)
        self.q = torch.zeros(tokens, heads, ROW, dtype=BF16, device=device)
        self.draft = torch.zeros(tokens, ROW, dtype=BF16, device=device)
        self.pool = torch.zeros(shape.slots, ROW, dtype=BF16, device=device)
        self.kv_indptr = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(shape.slots, dtype=torch.int64, device=device)
        self.options: dict[str, object] = {"nodes": nodes, "scale": SCALE, "max_prefix": shape.slots}
        if shape.form == "mask":
            self.mask = torch.zeros(self.cells, dtype=torch.uint8, device=device)
            self.mask_indptr = torch.zeros(batch + 1, dtype=torch.int64, device=device)
            self.options |= {"mask": self.mask, "mask_indptr": self.mask_indptr}
        elif shape.form == "bits":
            self.bits = torch.zeros(batch, nodes, (nodes + 63) // 64, dtype=torch.int64, device=device)
            self.options["tree_bits"] = self.bits
        self.buffers = kernel.buffers(batch, nodes, heads, max_prefix=shape.slots)
        self.tensors = (self.q, self.draft, self.pool, self.kv_indptr, self.kv_indices)
        self.graph = self._capture()

    def eager(self) -> None:
        tree_attention(*self.tensors, implementation=self.kernel.implementation, **self.options, **self.buffers)

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self.kernel.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.eager()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.eager()
        return graph

    def load(self, prefixes: Sequence[int]) -> Case:
        """Write new data for ``len(prefixes)`` live requests; the rest are padded. Returns the live part as a case."""
        shape, device = self.shape, self.kernel.device
        live, padded = len(prefixes), shape.batch - len(prefixes)
        nodes, total = shape.nodes, sum(prefixes)
        lengths = [*prefixes, *([1] * padded)]
        slots = torch.randperm(shape.slots - 1, generator=self.host)[:total] + 1
        indices = torch.full((shape.slots,), NOWHERE)
        indices[:total] = slots
        indices[total : total + padded] = 0  # padded requests name the dummy slot
        self.kv_indices.copy_(indices)
        self.kv_indptr.copy_(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32))
        self.pool.fill_(torch.nan)
        slots = slots.to(device)
        self.pool[slots] = torch.randn(total, ROW, dtype=BF16, device=device)
        self.pool[0] = 0.0 if padded and self.random.random() < 0.5 else torch.nan
        for tensor in (self.q, self.draft):
            tensor.fill_(torch.nan)
            tensor[: live * nodes].normal_()
        visible = torch.stack([random_tree(nodes, self.host) for _ in range(live)])
        if shape.form == "chain":
            visible = torch.ones(nodes, nodes, dtype=torch.bool).tril().repeat(live, 1, 1)
        options = {"nodes": nodes, "scale": SCALE}
        if shape.form == "mask":
            self._write_mask(visible, lengths)
            options |= {"mask": self.mask, "mask_indptr": self.mask_indptr[: live + 1]}
        elif shape.form == "bits":
            self.bits.fill_(-1)
            self.bits[:live] = pack_bits(visible).to(device)
            options["tree_bits"] = self.bits[:live]
        rows = slice(0, live * nodes)
        tensors = (self.q[rows], self.draft[rows], self.pool, self.kv_indptr[: live + 1], self.kv_indices)
        return Case(tensors, options, tuple(prefixes), visible)

    def _write_mask(self, visible: torch.Tensor, lengths: Sequence[int]) -> None:
        nodes = self.shape.nodes
        begins = [0, *itertools.accumulate(nodes * (length + nodes) for length in lengths)]
        used = torch.randint(0, 256, (begins[-1],), dtype=torch.uint8, generator=self.host)
        for request, one in enumerate(visible):
            rows = used[begins[request] : begins[request + 1]].view(nodes, -1)
            rows[:, lengths[request] :] = one.to(torch.uint8)
        self.mask.fill_(255)
        self.mask[: begins[-1]] = used.to(self.mask.device)
        self.mask_indptr.copy_(torch.tensor(begins))

    def poison(self) -> None:
        self.buffers["out"].fill_(torch.nan)
        self.buffers["lse"].fill_(torch.nan)
        self.buffers["workspace"].fill_(0xFF)

    def check(self, prefixes: Sequence[int], against_eager: bool = True) -> None:
        """Load, replay, compare the live rows with float64 and, bit for bit, with an eager call."""
        case = self.load(prefixes)
        self.poison()
        self.graph.replay()
        rows = slice(0, len(prefixes) * self.shape.nodes)
        got = self.buffers["out"][rows], self.buffers["lse"][rows]
        exact = exact_on_device(case)
        self.kernel.worst = max(self.kernel.worst, float((got[0].double() - exact[0]).norm() / exact[0].norm()))
        assert_matches(case, got, exact, RELATIVE_ERROR_FLAT[BF16])
        assert_guards(self.buffers)
        if against_eager:
            kept = got[0].clone(), got[1].clone()
            self.poison()
            self.eager()
            same_bits(kept, (self.buffers["out"][rows], self.buffers["lse"][rows]))

    def draw_prefixes(self, live: int) -> list[int]:
        """Lengths at the edges of tiles, short ones, and now and then a long one; they fit the pool."""
        room = self.shape.slots - self.shape.batch - 1
        lengths = []
        for _ in range(live):
            kind = self.random.random()
            drawn = self.random.choice(EDGES) if kind < 0.4 else self.random.randint(0, 600)
            drawn = self.random.randint(600, 5000) if kind > 0.93 else drawn
            lengths.append(min(drawn, room))
            room -= lengths[-1]
        return lengths


def f6_captured_for_4_live_3(kernel: Kernel) -> None:
    CapturedCall(kernel, Shape(4, 100, 2)).check((100, 7, 350))


def f7_replays_with_3_1_4(kernel: Kernel) -> None:
    for form in ("mask", "bits", "chain"):
        call = CapturedCall(kernel, Shape(4, 9, 8, form))
        for live in (3, 1, 4):
            call.check([64 * live, 5, 0, 1000][:live])


def f8_batch_shrinks_and_grows(kernel: Kernel) -> None:
    call = CapturedCall(kernel, Shape(32, 9, 8, "bits"))
    for live in (32, 12, 32):
        call.check([37 * (i % 7) for i in range(live)])


def f20_no_allocation_no_sync_right_stream(kernel: Kernel) -> None:
    call = CapturedCall(kernel, Shape(4, 9, 8))
    call.load((10, 20, 0, 300))
    call.poison()
    torch.cuda.synchronize()
    count = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[count]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.eager()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()[count] == before, "the call allocated"
    side = torch.cuda.Stream(kernel.device)
    side.wait_stream(torch.cuda.current_stream())
    kept = call.buffers["out"].clone(), call.buffers["lse"].clone()
    torch.cuda.synchronize()
    call.poison()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # about 10 ms: a launch on any other stream would finish before it
        call.eager()
        later = call.buffers["lse"].clone()
    torch.cuda.current_stream().synchronize()
    assert bool(call.buffers["lse"].isnan().all()) or side.query(), "launched on another stream"
    side.synchronize()
    same_bits(kept, (call.buffers["out"], later))


def f20_lengths_far_from_those_at_capture(kernel: Kernel) -> None:
    call = CapturedCall(kernel, Shape(2, 17, 16, "bits"))
    for prefixes in ((0, 0), (7000, 1), (1, 7000), (3500, 3600), (64, 64), (0, 1)):
        call.check(prefixes)


SHAPES = (
    Shape(4, 9, 8), Shape(1, 9, 8, "bits"), Shape(3, 33, 16), Shape(6, 17, 4, "bits"), Shape(2, 65, 16, "bits"),
    Shape(8, 5, 1, "chain"), Shape(2, 100, 2), Shape(5, 2, 128), Shape(16, 9, 8, "bits"), Shape(1, 1, 21, "chain"),
    Shape(3, 64, 6), Shape(2, 130, 3, "bits"),
)  # fmt: skip


def random_replays(kernel: Kernel, count: int, seed: int = 0) -> None:
    """``count`` replays of ``SHAPES`` in turn, each with its own batch, prefixes, trees and data."""
    calls = [CapturedCall(kernel, shape, seed + i) for i, shape in enumerate(SHAPES)]
    torch.cuda.manual_seed(seed)
    for replay in range(count):
        call = calls[replay % len(calls)]
        prefixes = call.draw_prefixes(call.random.randint(1, call.shape.batch))
        try:
            call.check(prefixes, against_eager=replay % 10 == 0)
        except AssertionError as error:
            raise AssertionError(f"replay {replay}, seed {seed}, {call.shape}, prefixes {prefixes}: {error}") from error


CHECKS: dict[str, Callable[[Kernel], None]] = {
    function.__name__: function
    for function in (
        f6_captured_for_4_live_3,
        f7_replays_with_3_1_4,
        f8_batch_shrinks_and_grows,
        f20_no_allocation_no_sync_right_stream,
        f20_lengths_far_from_those_at_capture,
    )
}
