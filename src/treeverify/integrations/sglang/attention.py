"""The backend: SGLang's Triton backend, whose MLA target-verify calls go to ``tree_attention``.

``on`` serves ours; ``validate`` computes both on the same live tensors, serves the parent's and counts the difference
on the device. In both, what ``tree_attention`` does not compute is left to the parent, by a named reason that is
counted and logged once. ``off`` never gets here: the factory returns SGLang's own backend.

A call allocates only the output that is served, as the parent does, and waits for nothing. The workspace is sized for
the largest captured batch before the first capture; an eager batch beyond it grows it (older ones stay alive, since
graphs hold their addresses).
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from treeverify.env import VerifyMode
from treeverify.errors import ContractError
from treeverify.integrations.sglang import compat
from treeverify.integrations.sglang.counters import Counters
from treeverify.ops.tree_attention.api import choose, tree_attention
from treeverify.ops.tree_attention.contract import LATENT, OPERATOR, ROW

logger = logging.getLogger(__name__)


class Verifier:
    """What one backend needs to serve verify calls, and what the probe reports of it."""

    def __init__(self, mode: VerifyMode, facts: compat.Facts, dtype: torch.dtype) -> None:
        self.mode = mode
        self.facts = facts
        self.kernel = choose(facts.device, None)
        self.counters = Counters(facts.layers, facts.device)
        self.shapes: set[tuple[int, int, int, str]] = set()
        """(requests, nodes, heads, mask dtype) of the calls made from the host, captures included."""
        self.left_to_parent: Counter[str] = Counter()
        self._dtype = dtype
        self._capacity = 0
        self._kept: list[torch.Tensor] = []
        if facts.device.type == "cuda":
            from treeverify.ops.tree_attention import cuda  # needs a compiler, or a compiled library

            cuda.prepare(facts.device, self.kernel)
        self.reserve(1)

    def reserve(self, batch: int) -> None:
        """Make room for ``batch`` requests. Raises ``ContractError`` if that needs memory during a capture."""
        if batch <= self._capacity:
            return
        device, heads, nodes = self.facts.device, self.facts.heads, self.facts.nodes
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ContractError.of(OPERATOR, "workspace: requests", f"<= {self._capacity} in a graph capture", batch)
        tokens = batch * nodes
        self._lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
        rows = tokens if self.mode is VerifyMode.VALIDATE else 0
        self._shadow = torch.empty(rows, heads, LATENT, dtype=self._dtype, device=device)
        self._workspace = torch.empty(self._workspace_bytes(batch), dtype=torch.uint8, device=device)
        self._kept += [self._lse, self._shadow, self._workspace]
        self._capacity = batch

    def unserved(self, q: torch.Tensor, k: torch.Tensor | None, layer: Any, options: dict[str, Any]) -> str | None:
        """Say why a verify call is left to the parent, None if it is ours."""
        for name, value in options.items():
            if value is not None:
                return f"option {name}"
        if k is None:
            return "k is None (shared KV)"
        if (layer.qk_head_dim, layer.v_head_dim) != (ROW, LATENT):
            return f"head dimensions {layer.qk_head_dim}, {layer.v_head_dim}"
        if q.dtype != self._dtype or k.dtype != self._dtype:
            return f"dtypes {q.dtype}, {k.dtype}"
        return compat.layer_option(layer)

    def leave(self, reason: str) -> None:
        """Note a verify call that the parent serves."""
        if reason not in self.left_to_parent:
            logger.warning("treeverify: a verify call is left to Triton: %s", reason)
        self.left_to_parent[reason] += 1

    def attend(self, call: compat.Call, out: torch.Tensor) -> torch.Tensor:
        """Compute ours into ``out [batch*nodes, heads, 512]``."""
        batch = call.q.shape[0] // call.nodes
        if call.nodes > self.facts.nodes:
            raise ContractError.of(OPERATOR, "nodes", f"<= {self.facts.nodes} (the server's draft tokens)", call.nodes)
        if batch > self._capacity:
            self.reserve(1 << (batch - 1).bit_length())
        shape = (batch, call.nodes, call.q.shape[1], "none" if call.mask is None else str(call.mask.dtype))
        if shape not in self.shapes:
            self.shapes.add(shape)
            logger.info("treeverify %s: requests %d, nodes %d, heads %d, mask %s", self.mode.value, *shape)
        tree_attention(
            call.q,
            call.draft_kv,
            call.kv_pool,
            call.kv_indptr,
            call.kv_indices,
            nodes=call.nodes,
            scale=call.scale,
            mask=call.mask,
            mask_indptr=call.mask_indptr,
            out=out,
            lse=self._lse[: call.q.shape[0]],
            workspace=self._workspace,
            max_prefix=self.facts.max_prefix,
            implementation=self.kernel,
        )
        return out

    def serve(self, call: compat.Call, out: torch.Tensor) -> None:
        """Mode on: ours into ``out``; counted once per forward pass, at layer 0 of this rank."""
        self.attend(call, out)
        if call.layer == self.facts.first_layer:
            self.counters.count(call.layer, call.slots != 0, call.q.shape[1])

    def compare(self, call: compat.Call, served: torch.Tensor) -> None:
        """Mode validate: ours beside ``served``, the difference into the counters."""
        if call.q.shape[0] > self._shadow.shape[0]:
            self.reserve(1 << (call.q.shape[0] // call.nodes - 1).bit_length())
        ours = self.attend(call, self._shadow[: call.q.shape[0]])
        self.counters.record(call.layer, served, ours, call.slots != 0)

    def _workspace_bytes(self, batch: int) -> int:
        if self.facts.device.type != "cuda":
            return 0
        from treeverify.ops.tree_attention.cuda import workspace_bytes

        return max(  # a batch of fewer requests may be split more
            workspace_bytes(
                requests,
                self.facts.nodes,
                self.facts.heads,
                device=self.facts.device,
                implementation=self.kernel,
                max_prefix=self.facts.max_prefix,
            )
            for requests in range(1, batch + 1)
        )


def extend(parent: type) -> type:
    """Return the backend class on top of ``parent``; ``verifier`` is set after its construction."""

    class TreeverifyAttnBackend(parent):  # type: ignore[misc]
        """SGLang's Triton backend with our verify attention."""

        verifier: Verifier

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *rest: Any, **options: Any) -> None:
            """Size the workspace for the graphs, which are captured next."""
            super().init_cuda_graph_state(max_bs, max_num_tokens, *rest, **options)
            self.verifier.reserve(max_bs)

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
            """Serve a verify call by mode, everything else by the parent."""
            stock = super().forward_extend
            if not compat.is_verify(forward_batch):
                kept: torch.Tensor = stock(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **options)
                return kept
            verifier = self.verifier
            reason = verifier.unserved(q, k, layer, options)
            if reason is not None:
                verifier.leave(reason)
            if reason is None and verifier.mode is VerifyMode.ON:
                if save_kv_cache:
                    compat.write_kv(self, forward_batch, layer, k, v)
                call = compat.verify_call(self, q, k, layer, forward_batch)
                out = compat.output(q, layer, forward_batch)
                verifier.serve(call, out.view(*call.q.shape[:2], LATENT))
                return out
            served: torch.Tensor = stock(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **options)
            if reason is None:
                call = compat.verify_call(self, q, k, layer, forward_batch)
                verifier.compare(call, served.view(*call.q.shape[:2], LATENT))
            return served

    return TreeverifyAttnBackend
