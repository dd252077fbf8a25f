"""This project's implementations, called as SGLang's verify step would: its mask, its indices, out and workspace."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch

from treeverify.bench.rivals.base import Call, Implementation
from treeverify.bench.workloads import LATENT, SCALE, Indices, Workload
from treeverify.ops.tree_attention.api import tree_attention

_PREFIX = "treeverify-"


def load(name: str) -> Implementation:
    """``name`` without its prefix is the ``implementation`` of ``tree_attention``."""
    own = name.removeprefix(_PREFIX)
    if own != "split_kv":
        import_module("treeverify.ops.tree_attention.cuda")
    layouts: tuple[Indices, ...] = ("scatter", "contig") if own.startswith("portable") else ("scatter",)
    return Implementation(name, layouts, tree=True, prepare=partial(_prepare, own))


def _prepare(implementation: str, work: Workload) -> list[Call]:
    point = work.point
    tokens = point.bs * point.nodes
    out = torch.empty(tokens, point.heads, LATENT, dtype=work.q.dtype, device=work.device)
    lse = torch.empty(tokens, point.heads, dtype=torch.float32, device=work.device)
    workspace = _workspace(implementation, work)

    def call(number: int) -> torch.Tensor:
        kv = work.sets[number]
        tree_attention(
            work.q,
            kv.draft_kv,
            work.pool,
            work.kv_indptr,
            kv.prefix_slots,
            nodes=point.nodes,
            scale=SCALE,
            mask=work.mask,
            mask_indptr=work.mask_indptr,
            out=out,
            lse=lse,
            workspace=workspace,
            implementation=implementation,
        )
        return out

    return [partial(call, number) for number in range(len(work.sets))]


def _workspace(implementation: str, work: Workload) -> torch.Tensor | None:
    """Bytes as the kernel states them; the torch implementation takes none."""
    if implementation == "split_kv":
        return None
    point = work.point
    cuda = import_module("treeverify.ops.tree_attention.cuda")
    size = cuda.workspace_bytes(batch=point.bs, nodes=point.nodes, heads=point.heads, device=work.device)
    return torch.empty(int(size), dtype=torch.uint8, device=work.device)
