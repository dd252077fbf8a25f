"""``flashmla-causal``: FlashMLA's dense decoding kernel on Hopper, page size 64; a causal chain, no tree.

Needs the package ``sgl-flash-mla``, whose "legacy" extension holds the sm_90 kernels.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from treeverify.bench.rivals.base import Call, Implementation, lengths
from treeverify.bench.workloads import LATENT, PAGE, ROW, SCALE, Workload


def load(name: str) -> Implementation:
    """Import the package; raises ``ImportError`` or ``RuntimeError`` with its reason if a part does not load."""
    package = import_module("flash_mla")
    import_module("flash_mla._loader").get_ops(True)
    return Implementation(
        name, ("page64",), tree=False, prepare=partial(_prepare, package), version=str(package.__version__)
    )


def _prepare(package: Any, work: Workload) -> list[Call]:
    point = work.point
    q = work.q.view(point.bs, point.nodes, point.heads, ROW)
    cache = work.pool.view(-1, PAGE, 1, ROW)
    kv_lengths = lengths(work, with_draft=True)
    schedule, _ = package.get_mla_metadata()  # filled by the first call; a server computes it once for all layers

    def call(number: int) -> torch.Tensor:
        out, _ = package.flash_mla_with_kvcache(
            q,
            cache,
            work.sets[number].pages,
            kv_lengths,
            LATENT,
            schedule,
            softmax_scale=SCALE,
            causal=True,
            use_legacy=True,
        )
        return torch.as_tensor(out).view(-1, point.heads, LATENT)

    return [partial(call, number) for number in range(len(work.sets))]
