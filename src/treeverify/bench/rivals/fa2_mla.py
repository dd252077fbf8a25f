"""``fa2-mla``: FlashInfer's FA2 MLA kernel, page size 1; a causal chain, no tree. It runs on every GPU from sm_80 on.

Needs FlashInfer's ``batch_mla`` module for bf16 and head dimensions 512 + 64, compiled ahead into a package folder
``flashinfer_batch_mla`` (``benchmarks/rivals/build.sh`` does it), and tvm-ffi to call it.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from treeverify.bench.rivals.base import Call, Implementation, lengths, query_starts, request_slots, starts
from treeverify.bench.workloads import LATENT, SCALE, Workload
from treeverify.jit.compiler import open_library

_PACKAGE = "flashinfer_batch_mla"
_CAUSAL = 1
_FLOAT_WORKSPACE, _INT_WORKSPACE = 128 * 2**20, 8 * 2**20


def load(name: str) -> Implementation:
    """Load the compiled module; raises ``ImportError`` if it is not there, ``BuildError`` if it does not load."""
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no package {_PACKAGE!r} on the path; benchmarks/rivals/build.sh prepares it")
    library = open_library(Path(spec.submodule_search_locations[0]) / "batch_mla_fa2.so")
    functions = library.function("plan"), library.function("run")
    return Implementation(name, ("scatter",), tree=False, prepare=partial(_prepare, *functions))


def _prepare(plan_work: Any, run: Any, work: Workload) -> list[Call]:
    """Plan once, as a server does per step; the plan depends on lengths only, so it serves every KV set."""
    point, device = work.point, work.device
    floats = torch.empty(_FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
    ints = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=device)
    pinned = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, pin_memory=True)
    kv_lengths = lengths(work, with_draft=True).cpu()
    query_indptr, kv_indptr = query_starts(work).cpu(), starts(kv_lengths)
    plan, staged = plan_work(floats, ints, pinned, query_indptr, kv_indptr, kv_lengths, point.heads, LATENT, True)
    ints[: int(staged)].copy_(pinned[: int(staged)])  # the planner leaves its result in host memory
    q_latent, q_rope = work.q[..., :LATENT], work.q[..., LATENT:]
    latent, rope = work.pool[:, None, :LATENT], work.pool[:, None, LATENT:]
    out = torch.empty(point.bs * point.nodes, point.heads, LATENT, dtype=work.q.dtype, device=device)

    def call(slots: torch.Tensor) -> torch.Tensor:
        run(
            floats,
            ints,
            plan,
            q_latent,
            q_rope,
            latent,
            rope,
            slots,
            out,
            None,  # no LSE
            _CAUSAL,
            point.heads,
            1,  # page size
            SCALE,
            False,
            1.0,
            1.0,
            None,
        )
        return out

    numbers = range(len(work.sets))
    return [partial(call, torch.cat(request_slots(work, n, with_draft=True)).to(torch.int32)) for n in numbers]
