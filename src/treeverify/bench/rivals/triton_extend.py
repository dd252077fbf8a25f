"""``triton-extend``: the kernel behind SGLang's Triton attention backend, with the tree mask.

Needs ``sglang`` (or just its ``kernels.ops.attention`` modules) and Triton.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from treeverify.bench.rivals.base import Call, Implementation, query_starts
from treeverify.bench.workloads import LATENT, SCALE, Workload


def load(name: str) -> Implementation:
    """Import the kernel; raises ``ImportError`` if SGLang or Triton is missing."""
    kernel = import_module("sglang.kernels.ops.attention.extend_attention").extend_attention_fwd
    return Implementation(name, ("scatter",), tree=True, prepare=partial(_prepare, kernel))


def _prepare(kernel: Any, work: Workload) -> list[Call]:
    """Arguments as TritonAttnBackend.forward_extend passes them in TARGET_VERIFY, under CUDA graphs."""
    point = work.point
    out = torch.empty(point.bs * point.nodes, point.heads, LATENT, dtype=work.q.dtype, device=work.device)
    keys = work.pool[:, None, :]
    values = keys[..., :LATENT]
    query_indptr = query_starts(work, torch.int64)

    def call(number: int) -> torch.Tensor:
        kv = work.sets[number]
        draft = kv.draft_kv[:, None, :]
        kernel(
            work.q,
            draft,
            draft[..., :LATENT],
            out,
            keys,
            values,
            query_indptr,
            work.kv_indptr,
            kv.prefix_slots,
            work.mask,
            True,  # causal as well: SGLang passes both, nodes are in topological order
            work.mask_indptr,
            point.nodes,
            1.0,
            1.0,
            SCALE,
            logit_cap=0.0,
            page_size=1,
        )
        return out

    return [partial(call, number) for number in range(len(work.sets))]
