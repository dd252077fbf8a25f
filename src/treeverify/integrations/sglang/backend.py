"""The class that SGLang gets: its Triton backend with the calls of ``calls`` dispatched by mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from treeverify.env import VerifyMode
from treeverify.integrations.sglang import calls
from treeverify.integrations.sglang.attention import Verifier
from treeverify.integrations.sglang.compat import CLASS_NAME
from treeverify.ops.tree_attention.contract import LATENT

_Parent: Any = object
"""SGLang's class is known at run time only."""


class _Modal(_Parent):  # type: ignore[misc]
    """The methods that differ from the parent's, which comes next in the order of resolution."""

    verifier: Verifier
    draft: bool
    """Whether it serves a draft model's extend calls; else it serves the target."""
    _masked_graphs = False
    """Whether the captured verify graphs read a mask."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *rest: Any, **options: Any) -> None:
        """Size the workspace for the graphs, which are captured next."""
        super().init_cuda_graph_state(max_bs, max_num_tokens, *rest, **options)
        self.verifier.reserve(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the buffers that a graph reads; refuse a graph that would verify a tree as a chain."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if calls.kind(forward_batch, self.draft) != calls.VERIFY:
            return
        if in_capture:
            self._masked_graphs = calls.check_capture(self.forward_metadata, forward_batch)
        else:  # the metadata at hand is that of the last eager call: a replay uses what was captured
            calls.check_replay(self._masked_graphs, forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Serve a verify or draft-extend call by mode, everything else by the parent."""
        stock = super().forward_extend
        arguments = (q, k, v, layer, forward_batch, save_kv_cache)
        if calls.kind(forward_batch, self.draft) is None:
            return _served(stock, arguments, options)
        return _route(
            self,
            stock,
            arguments,
            options,
            lambda: calls.extend_call(self, q, k, layer, forward_batch),
            None if calls.uniform(self, q) else "requests of unequal length",
        )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Serve a decode call of the target by mode, a draft's by the parent."""
        stock = super().forward_decode
        arguments = (q, k, v, layer, forward_batch, save_kv_cache)
        if self.draft:
            return _served(stock, arguments, options)
        return _route(
            self,
            stock,
            arguments,
            options,
            lambda: calls.decode_call(self, q, k, layer, forward_batch, self.verifier.no_bits(q.shape[0])),
        )


def extend(parent: type) -> type:
    """Return the backend class on top of ``parent``; ``verifier`` and ``draft`` are set after its construction."""
    return type(CLASS_NAME, (_Modal, parent), {"__doc__": "SGLang's Triton backend with our attention."})


Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, Any, bool]
"""``q, k, v, layer, forward_batch, save_kv_cache``."""


def _route(
    backend: Any,
    stock: Callable[..., Any],
    arguments: Arguments,
    options: dict[str, Any],
    make: Callable[[], calls.Call],
    reason: str | None = None,
) -> torch.Tensor:
    """Serve one call by mode; by the parent if there is a ``reason``, here or in its options."""
    q, k, v, layer, batch, save = arguments
    verifier: Verifier = backend.verifier
    mode = verifier.switch.ask(verifier)
    if mode is VerifyMode.OFF:
        if layer.layer_id == verifier.facts.first_layer and not verifier.switch.capturing:
            verifier.served_off(q.shape[0])
        return _served(stock, arguments, options)
    reason = reason or calls.left(backend, q, k, layer, options)
    if reason is not None:
        verifier.leave(reason)
        return _served(stock, arguments, options)
    if mode is VerifyMode.ON:
        if save:
            calls.write_kv(backend, batch, layer, k, v)
        out = calls.output(q, layer, batch)
        call = make()
        verifier.serve(call, out.view(*call.q.shape[:2], LATENT))
        return out
    served = _served(stock, arguments, options)
    call = make()
    verifier.compare(call, served.view(*call.q.shape[:2], LATENT))
    return served


def _served(stock: Callable[..., Any], arguments: Arguments, options: dict[str, Any]) -> torch.Tensor:
    *first, save = arguments
    out: torch.Tensor = stock(*first, save_kv_cache=save, **options)
    return out
