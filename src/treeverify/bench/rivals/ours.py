"""This project's implementations, called as SGLang's verify step would: its mask, its indices, out and workspace."""

from __future__ import annotations

from functools import partial

import torch

from treeverify.bench.rivals.base import MOST_CALL_US, Call, Implementation, TooSlowError
from treeverify.bench.workloads import ELEMENT_BYTES, LATENT, ROW, SCALE, Indices, Point, Workload
from treeverify.errors import BuildError
from treeverify.ops.tree_attention import cuda
from treeverify.ops.tree_attention.api import tree_attention

_PREFIX = "treeverify-"
_SERVED = "-served"
"""Suffix: the same kernel in a server's graph, which must serve any prefix and so knows no tighter bound than the
contract's. Without it the kernel is told the point's longest prefix, as FlashInfer's plan is told every length."""
_LONGEST = 262_144
_NAIVE_BYTES_PER_US = 2.0e6
"""What the naive kernel streams out of L2 at most, roughly."""


def load(name: str) -> Implementation:
    """``name`` without its prefix is the ``implementation`` of ``tree_attention``; compiles it now if need be."""
    served = name.endswith(_SERVED)
    own = name.removeprefix(_PREFIX).removesuffix(_SERVED)
    if own != "split_kv":
        if not torch.cuda.is_available():
            raise BuildError(f"{name}: needs a CUDA device")
        cuda.prepare(torch.device("cuda"), own)
    layouts: tuple[Indices, ...] = ("scatter", "contig") if own.startswith("portable") and not served else ("scatter",)
    return Implementation(name, layouts, tree=True, prepare=partial(_prepare, own, served))


def _prepare(implementation: str, served: bool, work: Workload) -> list[Call]:
    point = work.point
    tokens = point.bs * point.nodes
    if implementation == "naive" and (us := naive_us(point)) > MOST_CALL_US:
        raise TooSlowError("estimated", us)
    longest = _LONGEST if served else max(point.prefixes)
    out = torch.empty(tokens, point.heads, LATENT, dtype=work.q.dtype, device=work.device)
    lse = torch.empty(tokens, point.heads, dtype=torch.float32, device=work.device)
    workspace = _workspace(implementation, work, longest)

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
            max_prefix=longest,
        )
        return out

    return [partial(call, number) for number in range(len(work.sets))]


def naive_us(point: Point) -> float:
    """Estimate of a call of the naive kernel: every (token, head) reads its request's rows twice."""
    rows = point.nodes * point.heads * point.kv_tokens
    return rows * (ROW + LATENT) * ELEMENT_BYTES / _NAIVE_BYTES_PER_US


def _workspace(implementation: str, work: Workload, longest: int) -> torch.Tensor | None:
    """As many bytes as the kernel states; the torch implementation takes none."""
    if implementation == "split_kv":
        return None
    point = work.point
    size = cuda.workspace_bytes(
        point.bs,
        point.nodes,
        point.heads,
        device=work.device,
        implementation=implementation,
        max_prefix=longest,
    )
    return torch.empty(size, dtype=torch.uint8, device=work.device) if size else None
