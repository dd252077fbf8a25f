"""The keyword arguments of a ``tree_attention`` call, and the options of SGLang's call that are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, Required, TypedDict

import torch

from treeverify.errors import ContractError
from treeverify.ops.tree_attention.checks import OPERATOR


class Options(TypedDict, total=False):
    """What follows the five tensors of a call; ``nodes`` and ``scale`` are required."""

    nodes: Required[int]
    """Draft nodes per request, root included: 1..260 on a GPU."""
    scale: Required[float]
    """Factor on the scores before the softmax, finite and > 0."""
    mask: NotRequired[torch.Tensor | None]
    """Flat bool or uint8: request i has ``nodes`` rows of ``P_i + nodes`` cells at ``mask_indptr[i]``, of which only
    the last ``nodes`` are ever read."""
    mask_indptr: NotRequired[torch.Tensor | None]
    """``[batch+1]`` int32 or int64; with ``mask`` only."""
    tree_bits: NotRequired[torch.Tensor | None]
    """``[batch, nodes, ceil(nodes/64)]`` int64 or uint64: bit j of word i is draft column 64*i + j. At most one of
    ``mask`` and ``tree_bits``; neither means a causal chain in node order."""
    out: NotRequired[torch.Tensor | None]
    """``[batch*nodes, heads, 512]``, dtype of q: written in place if given; overlaps no input."""
    lse: NotRequired[torch.Tensor | None]
    """``[batch*nodes, heads]`` float32, natural log: written in place if given."""
    workspace: NotRequired[torch.Tensor | None]
    """Flat uint8, for the CUDA kernels only; checked and unused elsewhere."""
    fixed_split: NotRequired[int | None]
    """Prefix rows per split, >= 1 (a kernel may round up to whole tiles). With it a request's result does not depend,
    bit for bit, on its batch; without it the implementation chooses."""
    max_prefix: NotRequired[int | None]
    """The caller's bound on every ``P_i``, which the host cannot read off the device; the length of ``kv_indices``
    unless given. The kernel ``naive`` must hold that many scores in shared memory; with ``fixed_split`` the workspace
    grows with it."""


UNSUPPORTED_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "logit_cap": (None, 0, 0.0),
    "sliding_window": (None, -1),
    "sinks": (None,),
    "xai_temperature_len": (None, -1),
    "k_scale": (None, 1.0),
    "v_scale": (None, 1.0),
}
"""Options of SGLang's call that this operator does not compute, with the values that mean "off"."""


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise ``ContractError`` for the first option of SGLang's call that is set and not computed here.

    A value that means "off" (see ``UNSUPPORTED_OPTIONS``) passes. Tensors (scales, sinks) are refused unread: looking
    into one would wait for the device. A name that is not known at all is refused as well.
    """
    for name, value in options.items():
        off = UNSUPPORTED_OPTIONS.get(name)
        if off is None:
            known = ", ".join([*Options.__annotations__, *UNSUPPORTED_OPTIONS])
            raise ContractError.of(OPERATOR, name, f"one of the options {known}", "an unknown option")
        if isinstance(value, torch.Tensor) or value not in off:
            got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise ContractError.of(OPERATOR, name, "no value (this option is not supported)", got)


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Refuse whatever is not in ``Options``, and a call without ``nodes`` or ``scale``."""
    refuse_options({name: value for name, value in options.items() if name not in Options.__annotations__})
    for name in ("nodes", "scale"):
        if name not in options:
            raise ContractError.of(OPERATOR, name, "a value", "nothing")
