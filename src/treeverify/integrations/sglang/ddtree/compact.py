"""What the drafter reads: all committed tokens, or with ``--speculative-draft-window-size`` the last of them.

The window is SGLang's compact draft cache, as DFLASH has it: the drafter's runner has a slot table of its own over the
same KV slots. It is written anew before each draft from the target's table, so that nothing of it outlives a step. Row
layout: the slots of the last committed tokens, then those of the block. Positions stay those of the whole text.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from treeverify.integrations.sglang.ddtree.compat import PLAN, WORKER
from treeverify.integrations.sglang.names import check_assigned, check_parameters
from treeverify.step.window import Window

_PARAMETERS = {
    f"{WORKER}._ensure_draft_block_buffers": "self bs",
    f"{WORKER}._compute_compact_draft_seq_lens": "self seq_lens",
    f"{WORKER}._compute_compact_draft_seq_lens_host": "self host_seq_lens out",
    f"{WORKER}._rebuild_compact_draft_cache": "self req_pool_indices prefix_lens draft_prefix_lens "
    "verify_out_cache_loc_2d bs block_size",
}


def check() -> None:
    """Check names and signatures; raises ``ConfigError``."""
    for path, parameters in _PARAMETERS.items():
        check_parameters(path, parameters)
    check_assigned(WORKER, "use_compact_draft_cache draft_window_size")
    if find_spec(PLAN) is not None:  # 0.5.23
        check_parameters(f"{PLAN}.KVLocPlan.reads_from", "self source seq_lens seq_lens_cpu read_extent")


def seen(worker: Any, batch: Any, window: Window, block: int) -> Window:
    """Return the drafter's view of a step's window: its block's slots, and as many committed tokens as it reads.

    The host's bounds are those tokens and the block, exactly so where the host knows the lengths: FlashInfer plans a
    captured draft by them (0.5.23).
    """
    known = batch.seq_lens_cpu
    window = window.front(block)
    if not worker.use_compact_draft_cache:
        return window if known is None else _bounded(window, (known + block).to(torch.int32))
    requests = len(window.slots)
    bounds = torch.empty(requests, dtype=torch.int32)
    worker._compute_compact_draft_seq_lens_host(window.bounds if known is None else known, out=bounds)
    lengths = worker._compute_compact_draft_seq_lens(window.lengths)
    worker._ensure_draft_block_buffers(requests)  # the rebuild without a GPU writes to one of them
    worker._rebuild_compact_draft_cache(
        req_pool_indices=batch.req_pool_indices,
        prefix_lens=window.lengths,
        draft_prefix_lens=lengths,
        verify_out_cache_loc_2d=window.slots,
        bs=requests,
        block_size=block,
    )
    found = _bounded(window._replace(lengths=lengths), bounds + block)
    if window.plan is None:
        return found
    reader = worker.draft_model_runner.kv_index_translator
    plan = window.plan.reads_from(reader, seq_lens=lengths, seq_lens_cpu=found.bounds, read_extent=block)
    return found._replace(plan=plan)


def _bounded(window: Window, bounds: torch.Tensor) -> Window:
    return window._replace(bounds=bounds, bound=int(bounds.sum()))
