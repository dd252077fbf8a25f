"""The compiled implementations of ``tree_attention``: finds the library for the device and passes it the buffers.

No arithmetic and no fallback. A call allocates only what it is not given (``out``, ``lse``, ``workspace``), waits for
nothing and launches on torch's current stream, so it can be captured in a CUDA graph. Compiling and loading cannot:
call ``prepare``, or the operator once, before a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Unpack

import torch

from treeverify.errors import BuildError
from treeverify.jit import compiler
from treeverify.jit.modules import module_named, target_for
from treeverify.ops.tree_attention.contract import LATENT, Options

_UNBOUNDED = 262_144
"""Longest supported prefix: what ``workspace_bytes`` assumes unless it is told a bound."""


class _Functions(NamedTuple):
    run: Callable[..., object]
    workspace_bytes: Callable[..., int]
    multiprocessors: int


def prepare(device: torch.device, implementation: str = "portable") -> None:
    """Compile, if need be, and load the library of an implementation for ``device``. Raises ``BuildError``."""
    _functions(implementation, _index(device))


def workspace_bytes(
    batch: int,
    nodes: int,
    heads: int,
    *,
    device: torch.device,
    implementation: str = "portable",
    fixed_split: int | None = None,
    max_prefix: int = _UNBOUNDED,
) -> int:
    """Return the bytes of workspace that a call of these sizes needs, whatever its prefixes up to ``max_prefix``.

    Compiles and loads the library if need be; raises ``BuildError``.
    """
    functions = _functions(implementation, _index(device))
    return functions.workspace_bytes(batch, nodes, heads, functions.multiprocessors, fixed_split or 0, max_prefix)


def tree_attention_cuda(
    q: torch.Tensor,
    draft_kv: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    implementation: str = "portable",
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch ``implementation`` on torch's current stream; arguments and results as in ``api.tree_attention``.

    The binding checks again whatever could corrupt memory. Raises ``ValueError`` for a breach, ``BuildError`` if there
    is no library and none can be built, ``RuntimeError`` if the launch fails.
    """
    functions = _functions(implementation, _index(q.device))
    nodes, split = options["nodes"], options.get("fixed_split") or 0
    out, lse, workspace = options.get("out"), options.get("lse"), options.get("workspace")
    longest = options.get("max_prefix")
    longest = kv_indices.shape[0] if longest is None else longest
    tokens, heads = q.shape[0], q.shape[1]
    out = q.new_empty(tokens, heads, LATENT) if out is None else out
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if lse is None else lse
    if workspace is None:
        size = functions.workspace_bytes(tokens // nodes, nodes, heads, functions.multiprocessors, split, longest)
        workspace = q.new_empty(size, dtype=torch.uint8) if size else None
    functions.run(
        q,
        draft_kv,
        kv_pool,
        kv_indptr,
        kv_indices,
        options.get("mask"),
        options.get("mask_indptr"),
        options.get("tree_bits"),
        out,
        lse,
        workspace,
        nodes,
        options["scale"],
        split,
        longest,
    )
    return out, lse


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _functions(implementation: str, index: int) -> _Functions:
    module, target = (
        module_named(f"tree_attention.{implementation}"),
        target_for(torch.cuda.get_device_capability(index)),
    )
    if not compiler.loaded(module, target) and torch.cuda.is_current_stream_capturing():
        raise BuildError(
            f"{module.name} is not loaded, and loading cannot be captured: call prepare() before the capture"
        )
    library = compiler.load(module, target)
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return _Functions(library.function("run"), library.function("workspace_bytes"), count)  # type: ignore[arg-type]
