"""What the drafter is shown of a step's window, against a worker with DFLASH's arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from treeverify.integrations.sglang.ddtree import compact
from treeverify.ops.draft_window.contract import DraftWindow
from treeverify.step.window import Window

BLOCK, WIDTH, SIZE = 3, 7, 5


class Plan:
    """SGLang's plan of a step's slots, as far as it is asked."""

    def reads_from(self, source: str, **given: Any) -> tuple[str, dict[str, Any]]:
        return source, given


class Worker:
    """A worker whose drafter has a window; keeps what the rebuild of its table was given."""

    draft_model_runner = SimpleNamespace(kv_index_translator="drafter's")

    def __init__(self, size: int | None) -> None:
        self.use_compact_draft_cache, self.size = size is not None, size
        self.room, self.rebuilt = 0, dict[str, Any]()

    def _compute_compact_draft_seq_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        return seq_lens.to(torch.int32).clamp(max=self.size)

    def _compute_compact_draft_seq_lens_host(self, host_seq_lens: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(host_seq_lens.clamp(max=self.size))

    def _ensure_draft_block_buffers(self, bs: int) -> None:
        self.room = bs

    def _rebuild_compact_draft_cache(self, **given: Any) -> None:
        assert self.room == given["bs"]
        self.rebuilt = given


def step(known: bool, plan: Any = None) -> tuple[Any, Window]:
    """A batch of prefixes 2 and 9; the host knows their lengths, or is told at most 2 + 14 and 9 + 14."""
    lengths = torch.tensor([2, 9])
    bounds = (lengths + (WIDTH if known else 2 * WIDTH)).to(torch.int32)
    slots = torch.arange(100, 100 + 2 * WIDTH).view(2, WIDTH)
    batch = SimpleNamespace(seq_lens_cpu=lengths.clone() if known else None, req_pool_indices=torch.tensor([4, 1]))
    block = DraftWindow(slots, slots[:, :BLOCK].contiguous(), slots[:, :BLOCK], slots[:, :BLOCK])
    return batch, Window(slots, lengths, bounds, int(bounds.sum()), block, plan)


def test_without_a_window_all_is_seen_and_the_host_s_bounds_are_the_block_s() -> None:
    batch, window = step(known=True)
    seen = compact.seen(Worker(None), batch, window, BLOCK)
    assert torch.equal(seen.lengths, window.lengths)
    assert seen.slots.tolist() == [[100, 101, 102], [107, 108, 109]]
    assert (seen.bounds.tolist(), seen.bound) == ([2 + BLOCK, 9 + BLOCK], 11 + 2 * BLOCK)
    assert seen.bounds.dtype == torch.int32
    batch, window = step(known=False)
    seen = compact.seen(Worker(None), batch, window, BLOCK)
    assert (seen.bounds.tolist(), seen.bound) == (window.bounds.tolist(), window.bound)


def test_a_window_ends_at_the_root_and_is_followed_by_the_block() -> None:
    worker, (batch, window) = Worker(SIZE), step(known=True)
    seen = compact.seen(worker, batch, window, BLOCK)
    assert seen.lengths.tolist() == [2, SIZE]
    assert (seen.bounds.tolist(), seen.bound) == ([2 + BLOCK, SIZE + BLOCK], 2 + SIZE + 2 * BLOCK)
    assert worker.rebuilt.pop("verify_out_cache_loc_2d").tolist() == [[100, 101, 102], [107, 108, 109]]
    assert {name: value if isinstance(value, int) else value.tolist() for name, value in worker.rebuilt.items()} == {
        "req_pool_indices": [4, 1],
        "prefix_lens": [2, 9],
        "draft_prefix_lens": [2, SIZE],
        "bs": 2,
        "block_size": BLOCK,
    }
    assert torch.equal(window.lengths, torch.tensor([2, 9])), "the step's own view must stay"


def test_lengths_that_the_host_does_not_know_are_bounded() -> None:
    worker, (batch, window) = Worker(SIZE), step(known=False)
    seen = compact.seen(worker, batch, window, BLOCK)
    assert seen.lengths.tolist() == [2, SIZE]
    assert (seen.bounds.tolist(), seen.bound) == ([SIZE + BLOCK] * 2, 2 * (SIZE + BLOCK))


def test_a_plan_is_read_from_the_drafter_s_table() -> None:
    batch, window = step(known=True, plan=Plan())
    source, given = compact.seen(Worker(SIZE), batch, window, BLOCK).plan
    assert source == "drafter's"
    assert {name: value if isinstance(value, int) else value.tolist() for name, value in given.items()} == {
        "seq_lens": [2, SIZE],
        "seq_lens_cpu": [2 + BLOCK, SIZE + BLOCK],
        "read_extent": BLOCK,
    }
    kept = compact.seen(Worker(None), batch, window, BLOCK)
    assert kept.plan is window.plan
    assert kept.columns == slice(0, BLOCK)
