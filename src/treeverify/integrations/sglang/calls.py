"""The calls that ours serves, as views of what SGLang holds: nothing is copied, nothing is read off the device.

Three kinds: the target's verify call; the draft's extend call, which is a chain of the nodes just verified (an MLA
drafter's own KV); and a decode call, one node per request. A decode call's ``kv_indices`` already hold the slot of the
new token, whose row is stored before; as the one node of a tree that sees no draft row, it attends to just those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from treeverify.errors import ConfigError
from treeverify.integrations.sglang.names import find, mismatch
from treeverify.ops.tree_attention.contract import LATENT, ROW

WRITE_LOC = "sglang.srt.mem_cache.memory_pool.KVWriteLoc"
VERIFY, DRAFT_EXTEND = "verify", "draft-extend"


class Call(NamedTuple):
    """The tensors of one call."""

    q: torch.Tensor
    draft_kv: torch.Tensor
    kv_pool: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None
    tree_bits: torch.Tensor | None
    slots: torch.Tensor
    """``[batch*nodes]``: where SGLang stores the draft rows; 0 marks the padding of a CUDA graph."""
    nodes: int
    scale: float
    layer: int


def kind(batch: Any, draft: bool) -> str | None:
    """Name the kind of an extend call if it is one of ours: VERIFY of a target, DRAFT_EXTEND of a draft.

    A draft may issue verify calls too (DFLASH does): they are not the target's, so they are not ours.
    """
    mode = batch.forward_mode
    if draft:
        return DRAFT_EXTEND if mode.is_draft_extend_v2() else None
    return VERIFY if mode.is_target_verify() else None


def left(backend: Any, q: torch.Tensor, k: torch.Tensor | None, layer: Any, options: dict[str, Any]) -> str | None:
    """Say why a call is left to the parent, None if ``tree_attention`` computes it."""
    for name, value in options.items():
        if value is not None:
            return f"option {name}"
    if k is None:
        return "k is None (shared KV)"
    if (layer.qk_head_dim, layer.v_head_dim) != (ROW, LATENT):
        return f"head dimensions {layer.qk_head_dim}, {layer.v_head_dim}"
    dtype = backend.token_to_kv_pool.dtype
    if q.dtype != dtype or k.dtype != dtype:
        return f"dtypes {q.dtype}, {k.dtype}"
    return layer_option(layer)


def layer_option(layer: Any) -> str | None:
    """Name the first option of an attention layer that ``tree_attention`` does not compute, None if there is none."""
    if (layer.logit_cap or 0) > 0:
        return f"logit cap {layer.logit_cap}"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return f"sliding window of {layer.sliding_window_size}"
    if layer.is_cross_attention:
        return "cross-attention"
    if (getattr(layer, "xai_temperature_len", None) or -1) > 0:
        return f"xai temperature length {layer.xai_temperature_len}"
    if layer.k_scale is not None or layer.v_scale is not None:
        return "scaled KV (k_scale, v_scale)"
    return None


def uniform(backend: Any, q: torch.Tensor) -> bool:
    """Tell whether every request of an extend call has as many rows as the longest one."""
    metadata = backend.forward_metadata
    requests: int = metadata.kv_indptr.shape[0] - 1
    return q.shape[0] == requests * int(metadata.max_extend_len)


def check_capture(metadata: Any, batch: Any) -> bool:
    """Tell whether the verify graph that is captured reads a mask; ``ConfigError`` if a tree would lose its own.

    SGLang makes the verify input of a capture itself, and for an algorithm that is a plugin makes none: the captured
    metadata then has no mask, and the graph verifies a tree as a causal chain.
    """
    masked = metadata.custom_mask is not None
    if not masked and (batch.spec_info is None or getattr(batch.spec_info, "topk", 1) > 1):
        raise _lost_mask(batch)
    return masked


def check_replay(masked: bool, batch: Any) -> None:
    """Raise ``ConfigError`` where a batch brings a mask to a graph that was captured without one."""
    idle = getattr(batch, "actual_forward_mode", batch.forward_mode).is_idle()
    if not masked and not idle and getattr(batch.spec_info, "custom_mask", None) is not None:
        raise _lost_mask(batch)


def _lost_mask(batch: Any) -> ConfigError:
    return mismatch(
        "CUDA graph of target verify",
        "a mask in its metadata: a speculative algorithm that is a plugin must hook "
        "DecodeCudaGraphRunner.get_spec_info and spec_info.create_dummy_verify_input, which return None for it",
        f"no mask; verify input {type(batch.spec_info).__name__}",
    )


def extend_call(backend: Any, q: torch.Tensor, k: torch.Tensor, layer: Any, batch: Any) -> Call:
    """Gather one verify or draft-extend call: rows of equal number per request, with a mask or as a chain."""
    metadata = backend.forward_metadata
    mask = metadata.custom_mask
    return _call(backend, q, k, layer, batch)._replace(
        mask=mask,
        mask_indptr=None if mask is None else metadata.mask_indptr,
        nodes=int(metadata.max_extend_len),
    )


def decode_call(backend: Any, q: torch.Tensor, k: torch.Tensor, layer: Any, batch: Any, no_bits: torch.Tensor) -> Call:
    """Gather one decode call; ``no_bits [>= batch, 1, 1]`` is zero: the draft row itself is not seen twice."""
    return _call(backend, q, k, layer, batch)._replace(tree_bits=no_bits[: q.shape[0]])


def _call(backend: Any, q: torch.Tensor, k: torch.Tensor, layer: Any, batch: Any) -> Call:
    metadata = backend.forward_metadata
    return Call(
        q=q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        draft_kv=k,
        kv_pool=backend.token_to_kv_pool.get_key_buffer(layer.layer_id),
        kv_indptr=metadata.kv_indptr,
        kv_indices=metadata.kv_indices,
        mask=None,
        mask_indptr=None,
        tree_bits=None,
        slots=batch.out_cache_loc,
        nodes=1,
        scale=1.0 if layer.scaling is None else float(layer.scaling),
        layer=layer.layer_id,
    )


def output(q: torch.Tensor, layer: Any, batch: Any) -> torch.Tensor:
    """Return the tensor that the parent would fill: the caller's, or a new one."""
    given: torch.Tensor | None = getattr(batch, "_attn_output", None)
    return q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim)) if given is None else given


def write_kv(backend: Any, batch: Any, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store the new rows in the pool, as the parent does before it attends."""
    place = find(WRITE_LOC)
    if hasattr(place, "for_batch"):  # 0.5.23: the batch says whether its slots are physical
        where = place.for_batch(batch, swa_loc=backend.forward_metadata.swa_out_cache_loc)
    else:
        where = place(batch.out_cache_loc, backend.forward_metadata.swa_out_cache_loc)
    backend._set_kv_buffer(batch, layer, where, k, v)
