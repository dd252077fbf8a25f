"""``fa3-cascade`` and ``fa3-causal``: FlashAttention 3 as SGLang calls it on Hopper, page size 1.

FA3 takes no tree mask, so for topk > 1 SGLang runs two passes and merges them: all nodes over the prefix, then each
node as a request of its own over the draft slots it sees. The draft rows are in the pool by then. ``fa3-causal`` is
the single pass of a chain. Needs ``sgl_kernel.flash_attn`` (package ``sglang-kernel``) and SGLang's ``merge_state``.
"""

from __future__ import annotations

import ctypes
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from treeverify.bench.rivals.base import Call, Implementation, lengths, query_starts, request_slots, slot_table, starts
from treeverify.bench.workloads import LATENT, SCALE, Workload


def load(name: str) -> Implementation:
    """Import the packages; raises ``ImportError`` or ``OSError`` if one is missing or does not load."""
    _load_compiler()
    attend = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    if name == "fa3-causal":
        return Implementation(name, ("scatter",), tree=False, prepare=partial(_prepare_causal, attend))
    merge = import_module("sglang.kernels.ops.attention.merge_state").merge_state_triton
    return Implementation(name, ("scatter",), tree=True, prepare=partial(_prepare_cascade, attend, merge))


def _load_compiler() -> None:
    """``flash_ops`` links to NVRTC, which torch loads only when it needs it and the linker may not find."""
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            if "builtins" not in path.name and path.name.count(".") == 2:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                return


def _inputs(work: Workload) -> dict[str, Any]:
    """What every pass shares: query split into rope and latent part, and the pool seen as two caches."""
    return {
        "q": work.q[..., LATENT:],
        "qv": work.q[..., :LATENT],
        "k_cache": work.pool[:, None, None, LATENT:],
        "v_cache": work.pool[:, None, None, :LATENT],
        "softmax_scale": SCALE,
    }


def _prepare_causal(attend: Any, work: Workload) -> list[Call]:
    inputs, kv_lengths = _inputs(work), lengths(work, with_draft=True)
    metadata = {
        "cache_seqlens": kv_lengths,
        "cu_seqlens_q": query_starts(work),
        "cu_seqlens_k_new": starts(kv_lengths),
        "max_seqlen_q": work.point.nodes,
        "causal": True,
    }

    def call(table: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(attend(**inputs, page_table=table, **metadata))

    numbers = range(len(work.sets))
    return [partial(call, slot_table(request_slots(work, number, with_draft=True))) for number in numbers]


def _prepare_cascade(attend: Any, merge: Any, work: Workload) -> list[Call]:
    inputs, kv_lengths, point = _inputs(work), lengths(work, with_draft=False), work.point
    prefix = {
        "cache_seqlens": kv_lengths,
        "cu_seqlens_q": query_starts(work),
        "cu_seqlens_k_new": starts(kv_lengths),
        "max_seqlen_q": point.nodes,
        "causal": False,
        "return_softmax_lse": True,
    }
    seen = work.visible.reshape(-1, point.nodes).sum(dim=1, dtype=torch.int32)  # [bs * nodes]
    expand = prefix | {
        "cache_seqlens": seen,
        "cu_seqlens_q": torch.arange(seen.numel() + 1, dtype=torch.int32, device=work.device),
        "cu_seqlens_k_new": starts(seen),
        "max_seqlen_q": 1,
    }

    def call(table: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        out, lse, *_ = attend(**inputs, page_table=table, **prefix)
        draft_out, draft_lse, *_ = attend(**inputs, page_table=own, **expand)
        merged, _ = merge(out, lse.T.contiguous(), draft_out, draft_lse.T.contiguous())
        return torch.as_tensor(merged)

    calls: list[Call] = []
    for number, kv in enumerate(work.sets):
        table = slot_table(request_slots(work, number, with_draft=False))
        calls.append(partial(call, table, expand_table(kv.draft_slots, work.visible)))
    return calls


def expand_table(draft_slots: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """int32 ``[bs * nodes, nodes]``: each node's visible draft slots first, in node order; what follows is not read."""
    bs, nodes, _ = visible.shape
    order = torch.argsort(visible.to(torch.int8), dim=-1, descending=True, stable=True)
    slots = draft_slots.view(bs, 1, nodes).expand(bs, nodes, nodes)
    return slots.gather(2, order).reshape(bs * nodes, nodes).to(torch.int32)
