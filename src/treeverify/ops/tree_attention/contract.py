"""The contract of ``tree_attention``: dimensions, types, strides, supported range, tolerance; stated once.

The call is SGLang's TARGET_VERIFY attention of an absorbed MLA model. ``batch`` requests carry ``nodes`` draft nodes
each (root included); request ``i`` owns tokens ``i*nodes .. (i+1)*nodes - 1`` of ``q`` and ``draft_kv``. Its prefix is
the pool rows ``kv_indices[kv_indptr[i] : kv_indptr[i+1]]`` (``P_i`` of them), seen by all of its nodes. Draft rows are
never in ``kv_indices``; which of them a node sees is said by ``mask``, by ``tree_bits``, or, with neither, by the
order of the nodes (a causal chain).

What is never read: slots that ``kv_indices[: kv_indptr[-1]]`` does not name, ``kv_indices`` beyond ``kv_indptr[-1]``,
the first ``P_i`` columns of a mask row (SGLang leaves them uninitialised), and mask cells outside a request's rows.
``tree_bits`` bits at or above ``nodes`` are ignored. A draft row that no node of its request sees has no effect at all,
even if it holds NaN or infinity (a zero weight is not enough, the row must not be multiplied); such a value in a row
that some node sees may spoil its own request, never another one. A node that sees nothing gives 0 and LSE ``-inf``.

``check`` raises ``ContractError`` before anything is computed and never waits for a device: values (index ranges,
monotone pointers, mask size) are examined only where they lie in host memory.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Unpack

import torch

from treeverify.errors import ContractError
from treeverify.ops.tree_attention.checks import (
    OPERATOR,
    expect_device,
    expect_float,
    expect_int,
    expect_shaped,
    expect_strides,
    expect_tensor,
    expect_vector,
)
from treeverify.ops.tree_attention.options import UNSUPPORTED_OPTIONS, Options, refuse_options, refuse_unknown

__all__ = [
    "CUDA_LIMITS",
    "LATENT",
    "LSE_ERROR",
    "OPERATOR",
    "RELATIVE_ERROR",
    "RELATIVE_ERROR_FLAT",
    "ROPE",
    "ROW",
    "TORCH_LIMITS",
    "UNSUPPORTED_OPTIONS",
    "Limits",
    "Options",
    "Problem",
    "check",
    "refuse_options",
    "rows_of",
]

LATENT = 512
"""Columns of a KV row that also are its value vector, and columns of the output."""
ROPE = 64
ROW = LATENT + ROPE
"""Columns of a query or KV row."""

RELATIVE_ERROR = {torch.bfloat16: 2.0e-3, torch.float32: 1.0e-5}
"""Largest norm(out - exact) / norm(out) against float64 on the same inputs, by dtype, for scores whose standard
deviation is at least 1 (unit normal q and KV at scale 192**-0.5 give 1.7).

bfloat16 has 8 significand bits, so rounding x in [2**e, 2**(e+1)) errs by up to 2**(e-8), uniformly: rms
2**(e-8)/sqrt(3). Over normal values that is 1.66e-3 of their norm (measured; 1.53e-3 if log-uniform), and no output in
bfloat16 can do better. Tensor cores also want P in bfloat16: each weight errs by as much, but the largest is exp(0) = 1
and exact, so the share shrinks as the softmax sharpens: 1.5e-3 at score deviation 0.5, 0.9e-3 at 1.7, 0.5e-3 at 5. The
two are independent: sqrt(1.66**2 + 0.9**2) = 1.9e-3 (1.88e-3 to 1.98e-3 measured, by prefix and seed, with the sum
taken over the rounded weights; over the unrounded ones it is 1% more and can touch 2.0e-3). Partials and merge stay in
fp32 and add nothing visible; rounding partials to bfloat16 would add another 1.66e-3 in quadrature.
float32: unit roundoff 6e-8; sums over 576 columns and then up to 262,144 rows grow it by about the square root of the
length when blocked (24 and 512 at worst), a score error e moves exp by the same relative e: about 1e-6 in practice
(measured 2e-7 at 4,096 rows); 1e-5 leaves room for scores of magnitude 30.
"""
RELATIVE_ERROR_FLAT = {torch.bfloat16: 2.5e-3, torch.float32: 1.0e-5}
"""The same bound for any data: a nearly, but not exactly, uniform softmax reaches sqrt(1.66**2 + 1.5**2) = 2.25e-3."""

LSE_ERROR = {torch.bfloat16: 4.0e-3, torch.float32: 1.0e-5}
"""Largest abs(lse - exact) / max(1, abs(exact)): one bfloat16 rounding (2**-8) of the summed weights, if all
lean to one side, or float32's as above. An implementation that sums unrounded weights stays near 1e-6."""

INDEX_DTYPES = (torch.int32, torch.int64)
MASK_DTYPES = (torch.bool, torch.uint8)
BITS_DTYPES = (torch.int64, torch.uint64)


@dataclass(frozen=True)
class Limits:
    """What one implementation supports beyond the common contract; ``None`` means no limit."""

    name: str
    max_heads: int | None = None
    max_nodes: int | None = None
    max_batch: int | None = None
    max_rows: int | None = None
    """batch * nodes * heads: the kernel counts key tiles of all row tiles in 31 bits."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    alignment: int = 1
    """Bytes: base addresses and row strides of q, draft_kv, kv_pool and out are multiples of it."""


TORCH_LIMITS = Limits("torch")
CUDA_LIMITS = Limits(
    "cuda",
    max_heads=128,
    max_nodes=260,
    max_batch=(2**31 - 1) // (260 * 128),
    max_rows=1 << 22,
    dtypes=(torch.bfloat16,),
    alignment=16,
)
"""As ``csrc/ops/tree_attention``: params.h and the binding, which checks them again."""


@dataclass(frozen=True)
class Problem:
    """The dimensions that ``check`` bound, with dtype and device of ``q``."""

    batch: int
    nodes: int
    heads: int
    slots: int
    dtype: torch.dtype
    device: torch.device

    @property
    def tokens(self) -> int:
        """Rows of ``q``: batch * nodes."""
        return self.batch * self.nodes

    @property
    def words(self) -> int:
        """64-bit words of one row of ``tree_bits``."""
        return (self.nodes + 63) // 64


def check(
    q: torch.Tensor,
    draft_kv: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    limits: Limits = TORCH_LIMITS,
    **options: Unpack[Options],
) -> Problem:
    """Check one call (see ``api.tree_attention`` and ``Options``) and return its dimensions.

    Raises ``ContractError`` naming operator, tensor, dimension, what was expected and what came. Reads tensor values
    only when they are in host memory, so it neither waits for a device nor breaks a graph capture.
    """
    refuse_unknown(options)
    nodes = options["nodes"]
    for name, tensor in (("q", q), ("draft_kv", draft_kv), ("kv_pool", kv_pool)):
        expect_tensor(name, tensor)
    _check_scalars(nodes, options["scale"], options.get("fixed_split"), limits)
    if options.get("max_prefix") is not None:
        expect_int("max_prefix", options["max_prefix"], 0, None)
    problem = _check_query(q, nodes, limits)
    _check_matrix("draft_kv", draft_kv, problem, limits, rows=problem.tokens)
    _check_matrix("kv_pool", kv_pool, problem, limits, rows=None)
    problem = Problem(problem.batch, nodes, problem.heads, kv_pool.shape[0], q.dtype, q.device)
    expect_vector("kv_indptr", kv_indptr, INDEX_DTYPES, problem.device, length=problem.batch + 1)
    expect_vector("kv_indices", kv_indices, INDEX_DTYPES, problem.device)
    _check_visibility(options.get("mask"), options.get("mask_indptr"), options.get("tree_bits"), problem)
    _check_outputs(options, problem, limits)
    if kv_indptr.device.type == "cpu":
        _check_values(kv_indptr, kv_indices, options, problem)
    return problem


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """View KV rows ``[n, 576]`` or ``[n, 1, 576]`` as ``[n, 576]``, no copy."""
    return tensor[:, 0] if tensor.ndim == 3 else tensor


def _check_scalars(nodes: object, scale: object, fixed_split: object, limits: Limits) -> None:
    expect_int("nodes", nodes, 1, limits.max_nodes)
    if not isinstance(scale, float | int) or isinstance(scale, bool) or not (math.isfinite(scale) and scale > 0):
        raise ContractError.of(OPERATOR, "scale", "a finite float > 0 (SGLang's None means 1.0)", repr(scale))
    if fixed_split is not None:
        expect_int("fixed_split", fixed_split, 1, None)


def _check_query(q: torch.Tensor, nodes: int, limits: Limits) -> Problem:
    if q.ndim != 3:
        raise ContractError.of(OPERATOR, "q: rank", f"3 [batch*nodes, heads, {ROW}]", f"{q.ndim} {list(q.shape)}")
    expect_float("q", q, limits.dtypes)
    tokens, heads, row = q.shape
    if row != ROW:
        raise ContractError.of(OPERATOR, "q: dimension 2 (row)", ROW, row)
    if tokens % nodes:
        raise ContractError.of(OPERATOR, "q: dimension 0 (batch*nodes)", f"a multiple of nodes = {nodes}", tokens)
    if heads < 1 or (limits.max_heads is not None and heads > limits.max_heads):
        raise ContractError.of(OPERATOR, "q: dimension 1 (heads)", f"1..{limits.max_heads or 'any'}", heads)
    for name, size, most in (
        ("batch", tokens // nodes, limits.max_batch),
        ("batch * nodes * heads", tokens * heads, limits.max_rows),
    ):
        if most is not None and size > most:
            raise ContractError.of(OPERATOR, f"q: {name}", f"<= {most}", size)
    expect_strides("q", q, ROW, limits.alignment)
    return Problem(tokens // nodes, nodes, heads, 0, q.dtype, q.device)


def _check_matrix(name: str, tensor: torch.Tensor, problem: Problem, limits: Limits, rows: int | None) -> None:
    shape = f"[{'slots' if rows is None else rows}, {ROW}] or [.., 1, {ROW}]"
    if tensor.ndim not in (2, 3):
        raise ContractError.of(OPERATOR, f"{name}: rank", f"2 or 3 {shape}", f"{tensor.ndim} {list(tensor.shape)}")
    expect_float(name, tensor, limits.dtypes)
    if tensor.dtype != problem.dtype:
        raise ContractError.of(OPERATOR, f"{name}: dtype", f"{problem.dtype} (that of q)", tensor.dtype)
    if tensor.ndim == 3 and tensor.shape[1] != 1:
        raise ContractError.of(OPERATOR, f"{name}: dimension 1 (KV heads)", 1, tensor.shape[1])
    if tensor.shape[-1] != ROW:
        raise ContractError.of(OPERATOR, f"{name}: dimension {tensor.ndim - 1} (row)", ROW, tensor.shape[-1])
    if rows is not None and tensor.shape[0] != rows:
        raise ContractError.of(OPERATOR, f"{name}: dimension 0 (batch*nodes)", rows, tensor.shape[0])
    expect_device(name, tensor, problem.device)
    expect_strides(name, tensor, ROW, limits.alignment)


def _check_visibility(
    mask: torch.Tensor | None, mask_indptr: torch.Tensor | None, tree_bits: torch.Tensor | None, problem: Problem
) -> None:
    if mask is not None and tree_bits is not None:
        raise ContractError.of(OPERATOR, "mask, tree_bits", "at most one of them", "both")
    if (mask is None) != (mask_indptr is None):
        missing = "mask" if mask is None else "mask_indptr"
        raise ContractError.of(OPERATOR, missing, "mask and mask_indptr together", "None")
    if mask is not None:
        expect_vector("mask", mask, MASK_DTYPES, problem.device)
        expect_vector("mask_indptr", mask_indptr, INDEX_DTYPES, problem.device, length=problem.batch + 1)
        least = problem.batch * problem.nodes * problem.nodes
        if mask.numel() < least:
            raise ContractError.of(OPERATOR, "mask: dimension 0", f">= {least} (batch * nodes * nodes)", mask.numel())
    if tree_bits is not None:
        shape = (problem.batch, problem.nodes, problem.words)
        expect_shaped("tree_bits", tree_bits, BITS_DTYPES, problem.device, shape)
        if not tree_bits.is_contiguous():
            raise ContractError.of(OPERATOR, "tree_bits: strides", "contiguous", list(tree_bits.stride()))


def _check_outputs(options: Options, problem: Problem, limits: Limits) -> None:
    out, lse, workspace = options.get("out"), options.get("lse"), options.get("workspace")
    if out is not None:
        expect_shaped("out", out, (problem.dtype,), problem.device, (problem.tokens, problem.heads, LATENT))
        expect_strides("out", out, LATENT, limits.alignment)
    if lse is not None:
        expect_shaped("lse", lse, (torch.float32,), problem.device, (problem.tokens, problem.heads))
        if not lse.is_contiguous():
            raise ContractError.of(OPERATOR, "lse: strides", "contiguous", list(lse.stride()))
    if workspace is not None:
        expect_vector("workspace", workspace, (torch.uint8,), problem.device)


def _check_values(kv_indptr: torch.Tensor, kv_indices: torch.Tensor, options: Options, problem: Problem) -> None:
    """Host-memory checks: pointers monotone from 0, slots within the pool, every mask row within the mask."""
    starts: list[int] = kv_indptr.tolist()
    if starts[0] != 0:
        raise ContractError.of(OPERATOR, "kv_indptr: element 0", 0, starts[0])
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    for index, length in enumerate(lengths):
        if length < 0:
            raise ContractError.of(
                OPERATOR, f"kv_indptr: element {index + 1}", f">= {starts[index]}", starts[index + 1]
            )
    bound = options.get("max_prefix")
    if bound is not None and max(lengths, default=0) > bound:
        raise ContractError.of(OPERATOR, "max_prefix", f">= {max(lengths)} (the longest prefix)", bound)
    if starts[-1] > kv_indices.numel():
        raise ContractError.of(
            OPERATOR, "kv_indices: dimension 0", f">= {starts[-1]} (kv_indptr[-1])", kv_indices.numel()
        )
    if starts[-1]:
        low, high = (int(bound) for bound in kv_indices[: starts[-1]].aminmax())
        if low < 0 or high >= problem.slots:
            got = low if low < 0 else high
            raise ContractError.of(OPERATOR, "kv_indices: slot", f"0..{problem.slots - 1} (within kv_pool)", got)
    mask, mask_indptr = options.get("mask"), options.get("mask_indptr")
    if mask is None or mask_indptr is None:
        return
    offsets: list[int] = mask_indptr.tolist()
    for index, length in enumerate(lengths):
        cells = problem.nodes * (length + problem.nodes)
        begin, end = offsets[index], offsets[index + 1]
        if begin < 0 or end - begin < cells:
            expected = f">= {cells} cells (nodes * (P + nodes)) from an offset >= 0"
            raise ContractError.of(OPERATOR, f"mask_indptr: request {index}", expected, f"{begin}..{end}")
        if begin + cells > mask.numel():
            raise ContractError.of(OPERATOR, "mask: dimension 0", f">= {begin + cells}", mask.numel())
