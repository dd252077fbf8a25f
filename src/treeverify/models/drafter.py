"""The DFlash drafter: one non-causal block [root, MASK, MASK, ...] over the target's features, in plain torch.

Every committed token leaves one context row per layer: K and V of ``hidden_norm(fc(features))``, made once when the
token is committed (k_norm and rotate-half rope at the token's position; no input norm). A draft runs the block over
those rows and itself; its logits at block position d are the marginal of the token d places after the root.
Embedding, head and the MASK row belong to the target. Source: SGLang's ``DFlashDraftModel``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from treeverify.models import layout, rotary, weights
from treeverify.models.config import DrafterConfig
from treeverify.models.target import Target


@dataclass(frozen=True)
class _Layer:
    norm_in: torch.Tensor
    norm_out: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * dim, hidden]
    norm_q: torch.Tensor  # [dim]
    norm_k: torch.Tensor  # [dim]
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Drafter:
    """A DFlash drafter bound to the target whose embedding and head it borrows; dtype and device are the target's."""

    def __init__(
        self, config: DrafterConfig, tensors: dict[str, torch.Tensor], target: Target, *, source: object = "drafter"
    ) -> None:
        """Check ``tensors`` against ``config`` and ``config`` against ``target`` (ConfigError, WeightsError)."""
        config.check_computed(source)
        config.check_against(target.config)
        tensors = layout.renamed(tensors, "model.", source)
        weights.check(tensors, layout.drafter_shapes(config), layout.drafter_unused(config, tensors), source)
        self.config, self._target = config, target
        self.depth, self.feature_layers = config.depth, config.target_layer_ids
        device, dtype = target.device, target.dtype
        moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
        self._fc, self._norm_context, self._norm = (moved[f"{n}.weight"] for n in ("fc", "hidden_norm", "norm"))
        self._layers = [_layer(moved, f"layers.{index}.") for index in range(config.num_hidden_layers)]
        queries = config.num_attention_heads * config.head_dim
        self._context_kv = torch.cat([layer.qkv[queries:] for layer in self._layers])
        self._context_norm = torch.stack([layer.norm_k for layer in self._layers])[:, None]  # [layers, 1, dim]
        positions = target.config.context + config.block_size
        self._cos, self._sin = rotary.halves(positions, config.head_dim, config.rope_theta, device)
        self._block = torch.arange(config.block_size, device=device)
        self._mask_row = target.embedding[config.mask_token_id]

    @classmethod
    def load(cls, path: Path, target: Target) -> Drafter:
        """Read ``path/config.json`` and its safetensors; ConfigError or WeightsError, one line each."""
        return cls(DrafterConfig.load(path), weights.load(path), target, source=path)

    def new_pool(self, slots: int) -> torch.Tensor:
        """Uninitialised context rows [slots, layers, 2 (K, V), kv_heads, dim]; slots are the target pool's."""
        c = self.config
        shape = (slots, c.num_hidden_layers, 2, c.num_key_value_heads, c.head_dim)
        return torch.empty(shape, dtype=self._target.dtype, device=self._target.device)

    def write(self, pool: torch.Tensor, slots: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> None:
        """Write context rows of committed tokens: features [tokens, layers * hidden] at positions, slots [tokens]."""
        c = self.config
        context = self._rms(F.linear(features, self._fc), self._norm_context)
        rows = F.linear(context, self._context_kv).view(-1, *pool.shape[1:])
        keys = F.rms_norm(rows[:, :, 0], (c.head_dim,), None, c.rms_norm_eps) * self._context_norm
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        rows[:, :, 0] = rotary.rotate_halves(keys, cos, sin)
        pool.index_copy_(0, slots, rows)

    def draft(
        self,
        pool: torch.Tensor,
        roots: torch.Tensor,
        starts: torch.Tensor,
        context_slots: torch.Tensor,
        lengths: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits float32 [batch, depth, vocab] for the tokens after each root.

        roots int64 [batch] sit at positions starts int64 [batch]; context_slots int64 [batch, longest] name the
        committed tokens' rows, of which the first lengths int64 [batch] count (None: all of them do). Slots past a
        request's length must name finite rows: they are masked, not skipped.
        """
        c = self.config
        batch, longest = context_slots.shape
        block = c.block_size
        x = self._mask_row.expand(batch, block, -1).clone()
        x[:, 0] = self._target.embedding[roots]
        positions = (starts[:, None] + self._block).flatten()
        cos, sin = self._cos[positions], self._sin[positions]
        # One gather for all layers; the block's own rows then replace the last ``block`` of each request.
        wanted = torch.cat([context_slots, context_slots[:, :1].expand(batch, block)], 1)
        rows = pool.index_select(0, wanted.flatten()).view(batch, longest + block, *pool.shape[1:])
        mask = None
        if lengths is not None:
            places = torch.arange(longest + block, device=pool.device)
            mask = ((places < lengths[:, None]) | (places >= longest))[:, None, None]
        x = x.flatten(0, 1)
        for index, layer in enumerate(self._layers):
            x = x + self._attention(layer, x, rows[:, :, index], (cos, sin), mask)
            gate, up = F.linear(self._rms(x, layer.norm_out), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        x = self._rms(x.view(batch, block, -1)[:, 1:], self._norm)
        return F.linear(x, self._target.head).float()

    def _attention(
        self,
        layer: _Layer,
        x: torch.Tensor,
        rows: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [batch * block, hidden], rows [batch, longest + block, 2, kv_heads, dim] (tail filled in here)."""
        c = self.config
        heads, kv_heads, block = c.num_attention_heads, c.num_key_value_heads, c.block_size
        group = heads // kv_heads
        mixed = F.linear(self._rms(x, layer.norm_in), layer.qkv).view(-1, heads + 2 * kv_heads, c.head_dim)
        q = rotary.rotate_halves(self._rms(mixed[:, :heads], layer.norm_q), *turn)
        keys = rotary.rotate_halves(self._rms(mixed[:, heads : heads + kv_heads], layer.norm_k), *turn)
        batch = rows.shape[0]
        rows[:, -block:, 0] = keys.view(batch, block, kv_heads, c.head_dim)
        rows[:, -block:, 1] = mixed[:, heads + kv_heads :].view(batch, block, kv_heads, c.head_dim)
        # The block is not causal, so the queries of one KV head's group are just more rows: no repeated keys.
        q = q.view(batch, block, kv_heads, group, c.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        seen = F.scaled_dot_product_attention(
            q, rows[:, :, 0].transpose(1, 2), rows[:, :, 1].transpose(1, 2), attn_mask=mask
        )
        seen = (
            seen.view(batch, kv_heads, group, block, c.head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(batch * block, heads * c.head_dim)
        )
        return F.linear(seen, layer.out)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _layer(tensors: dict[str, torch.Tensor], prefix: str) -> _Layer:
    def at(name: str) -> torch.Tensor:
        return tensors[f"{prefix}{name}.weight"]

    return _Layer(
        norm_in=at("input_layernorm"),
        norm_out=at("post_attention_layernorm"),
        qkv=torch.cat([at(f"self_attn.{name}_proj") for name in "qkv"]),
        norm_q=at("self_attn.q_norm"),
        norm_k=at("self_attn.k_norm"),
        out=at("self_attn.o_proj"),
        gate_up=torch.cat([at("mlp.gate_proj"), at("mlp.up_proj")]),
        down=at("mlp.down_proj"),
    )
