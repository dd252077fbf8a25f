"""The slots of one step, found in SGLang's slot table, and the drafter's input in the first of them."""

from __future__ import annotations

from typing import Any

import torch

from treeverify.ops.draft_window.api import draft_window
from treeverify.ops.draft_window.contract import DraftWindow
from treeverify.step.window import Window


def open_window(worker: Any, batch: Any, out: DraftWindow) -> Window:
    """Find the slots of this step, which ``prepare_for_decode`` reserved, and write the drafter's input, into ``out``.

    ``bonus_tokens`` may have -1, which is no token: logits that were NaN. SGLang ends that request a step later.
    """
    runner, lengths, width = worker.model_runner, batch.seq_lens, out.slots.shape[1]
    if lengths.is_cuda:  # under overlap scheduling another stream made them
        lengths.record_stream(torch.cuda.current_stream(lengths.device))
    draft_window(
        batch.req_pool_indices,
        lengths,
        runner.req_to_token_pool.req_to_token,
        batch.spec_info.bonus_tokens,
        block=out.ids.shape[1],
        width=width,
        mask_token=worker._mask_token_id,
        out=out,
    )
    reserved = _reserved(batch.spec_info)
    if batch.seq_lens_cpu is not None:
        bounds = (batch.seq_lens_cpu + width).to(torch.int32)
    elif reserved is not None:
        bounds = reserved.to(torch.int32, copy=True)  # SGLang reuses it
    else:
        bounds = torch.tensor([req.kv.kv_allocated_len for req in batch.reqs], dtype=torch.int32)
    plan = None
    if hasattr(runner, "kv_index_translator"):
        plan = runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=lengths,
            seq_lens_cpu=bounds if batch.seq_lens_cpu is None else batch.seq_lens_cpu,
            write_virtual=out.slots.view(-1),
            read_extent=width,
        )
    return Window(out.slots, lengths, bounds, int(bounds.sum()), out, plan)


def _reserved(draft_input: Any) -> torch.Tensor | None:
    found: torch.Tensor | None = getattr(draft_input, "nxt_kv_lens_cpu", None)  # 0.5.23
    return getattr(draft_input, "reserved_seq_lens_cpu", None) if found is None else found
