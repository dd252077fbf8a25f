"""Stand-ins for what SGLang hands to its attention backend, and a parent that computes in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from treeverify.env import VerifyMode
from treeverify.integrations.sglang.attention import Verifier
from treeverify.integrations.sglang.backend import extend
from treeverify.integrations.sglang.compat import Facts
from treeverify.integrations.sglang.modes import Switch
from treeverify.ops.tree_attention.reference import tree_attention_reference

NODES, HEADS, SLOTS = 5, 2, 64
PARENTS = (-1, 0, 0, 1, 2)


def tree_mask() -> torch.Tensor:
    mask = torch.eye(NODES, dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


class FakeParent:
    """A backend with the attributes that ours reads; serves the reference."""

    def __init__(self, prefixes: Sequence[int] = (7, 3), mode: VerifyMode = VerifyMode.ON) -> None:
        generator = torch.Generator().manual_seed(1)
        self.pool = torch.randn(SLOTS, 1, 576, generator=generator)
        self.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: self.pool, dtype=torch.float32)
        slots = torch.randperm(SLOTS - 1, generator=generator) + 1
        tokens = NODES * len(prefixes)
        starts = torch.tensor([0, *prefixes]).cumsum(0)
        cells = torch.tensor([0, *(NODES * (prefix + NODES) for prefix in prefixes)]).cumsum(0)
        mask = [torch.cat([torch.zeros(NODES, p, dtype=torch.bool), tree_mask()], 1).flatten() for p in prefixes]
        self.forward_metadata = SimpleNamespace(
            kv_indptr=starts.to(torch.int32),
            kv_indices=slots[: starts[-1]],
            custom_mask=torch.cat(mask),
            mask_indptr=cells,
            max_extend_len=NODES,
        )
        self.slots = slots[-tokens:]
        self.served: list[str] = []
        self.reserved = 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.reserved = max_bs

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.captured = in_capture

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None) -> torch.Tensor:
        self.served.append("parent")
        mode = forward_batch.forward_mode
        if not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            return torch.zeros(q.shape[0], HEADS * 512)
        data = self.forward_metadata
        out, _ = tree_attention_reference(
            q.view(-1, HEADS, 576),
            k,
            self.pool,
            data.kv_indptr,
            data.kv_indices,
            nodes=NODES,
            scale=1.0 if layer.scaling is None else layer.scaling,
            mask=data.custom_mask,
            mask_indptr=None if data.custom_mask is None else data.mask_indptr,
        )
        return out.to(q.dtype).flatten(1)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options) -> torch.Tensor:
        """Plain attention over the slots in ``kv_indices``."""
        self.served.append("parent")
        data, rows = self.forward_metadata, []
        for request, one in enumerate(q.view(-1, HEADS, 576)):
            span = slice(data.kv_indptr[request], data.kv_indptr[request + 1])
            seen = self.pool[data.kv_indices[span], 0]
            rows.append(torch.softmax(one @ seen.T * layer.scaling, -1) @ seen[:, :512])
        return torch.stack(rows).flatten(1)


def make_layer(**changes: Any) -> SimpleNamespace:
    base = {
        "layer_id": 0,
        "tp_q_head_num": HEADS,
        "qk_head_dim": 576,
        "v_head_dim": 512,
        "scaling": 0.1,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "xai_temperature_len": -1,
        "k_scale": None,
        "v_scale": None,
    }
    return SimpleNamespace(**(base | changes))


def make_switch(mode: VerifyMode, *others: VerifyMode) -> Switch:
    return Switch(mode, tuple(known for known in VerifyMode if known in (mode, *others)))


def make_backend(
    mode: VerifyMode | Switch, prefixes: Sequence[int] = (7, 3), layers: int = 2, draft: bool = False
) -> Any:
    backend = extend(FakeParent)(prefixes)
    facts = Facts(torch.device("cpu"), HEADS, NODES, SLOTS, 0, layers)
    backend.verifier = Verifier(mode if isinstance(mode, Switch) else make_switch(mode), facts, torch.float32)
    backend.draft = draft
    return backend


def make_mode(name: str) -> SimpleNamespace:
    """A forward mode of SGLang: ``target_verify``, ``draft_extend_v2``, ``decode`` or ``idle``."""
    names = ("target_verify", "draft_extend_v2", "decode", "idle")
    return SimpleNamespace(**{f"is_{known}": lambda known=known: known == name for known in names})


def call(
    backend: Any, layer: Any = None, mode: str = "target_verify", save: bool = False, **options: Any
) -> torch.Tensor:
    """One call of ``forward_extend`` with fixed random inputs."""
    generator = torch.Generator().manual_seed(2)
    tokens = len(backend.slots)
    q = torch.randn(tokens, HEADS * 576, generator=generator)
    k = torch.randn(tokens, 1, 576, generator=generator)
    batch = SimpleNamespace(forward_mode=make_mode(mode), out_cache_loc=backend.slots, batch_size=tokens // NODES)
    layer = make_layer() if layer is None else layer
    return backend.forward_extend(q, k, k[..., :512], layer, batch, save_kv_cache=save, **options)


def decode(backend: Any, poison: bool = False) -> torch.Tensor:
    """One call of ``forward_decode``; ``poison``: the new rows hold NaN where they are handed in again."""
    generator = torch.Generator().manual_seed(2)
    batch = len(backend.slots) // NODES
    q = torch.randn(batch, HEADS * 576, generator=generator)
    k = torch.full((batch, 1, 576), torch.nan) if poison else torch.randn(batch, 1, 576, generator=generator)
    forward_batch = SimpleNamespace(
        forward_mode=make_mode("decode"), out_cache_loc=backend.slots[:batch], batch_size=batch
    )
    return backend.forward_decode(q, k, k[..., :512], make_layer(), forward_batch, save_kv_cache=False)
