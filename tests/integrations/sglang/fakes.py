"""Stand-ins for what SGLang hands to its attention backend, and a parent that computes in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from treeverify.env import VerifyMode
from treeverify.integrations.sglang.attention import Verifier, extend
from treeverify.integrations.sglang.compat import Facts
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
        self.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: self.pool)
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

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None) -> torch.Tensor:
        self.served.append("parent")
        if not forward_batch.forward_mode.is_target_verify():
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


def make_backend(mode: VerifyMode, prefixes: Sequence[int] = (7, 3), layers: int = 2) -> Any:
    backend = extend(FakeParent)(prefixes)
    facts = Facts(torch.device("cpu"), HEADS, NODES, SLOTS, 0, layers)
    backend.verifier = Verifier(mode, facts, torch.float32)
    return backend


def call(backend: Any, layer: Any = None, verify: bool = True, save: bool = False, **options: Any) -> torch.Tensor:
    """One call of ``forward_extend`` with fixed random inputs."""
    generator = torch.Generator().manual_seed(2)
    tokens = len(backend.slots)
    q = torch.randn(tokens, HEADS * 576, generator=generator)
    k = torch.randn(tokens, 1, 576, generator=generator)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: verify), out_cache_loc=backend.slots)
    layer = make_layer() if layer is None else layer
    return backend.forward_extend(q, k, k[..., :512], layer, batch, save_kv_cache=save, **options)
