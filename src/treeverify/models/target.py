"""The MLA target (DeepSeek-V3 layout): absorbed attention over a paged pool, the attention itself passed in.

Absorbed: W_UK is folded into the query and W_UV into the output, so that attention runs over KV rows of
[latent | rope] values shared by all heads, as SGLang's does (DeepSeek-V2 paper, section 2.1). Weights are prepared once
at load: projections of one input fused, rotary rows made interleaved, experts stacked into one dense GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from treeverify.models import layout, rotary, weights
from treeverify.models.config import TargetConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q [tokens, heads, row], draft_kv [tokens, row], kv_pool [slots, row]) -> [tokens, heads, latent]."""


@dataclass(frozen=True)
class _Mlp:
    """Gate and up stacked [2 * width, hidden], down [hidden, width]; experts, if any, side by side in width."""

    gate_up: torch.Tensor
    down: torch.Tensor
    router: torch.Tensor | None = None  # float32 [experts, hidden]
    bias: torch.Tensor | None = None  # float32 [experts]: moves the choice of experts, not their weights


@dataclass(frozen=True)
class _Layer:
    """One layer's prepared weights; ``inputs`` yields [q_nope | q_rope | k_rope | latent], or q_a in place of q."""

    norm_in: torch.Tensor
    norm_out: torch.Tensor
    norm_latent: torch.Tensor
    inputs: torch.Tensor
    norm_q: torch.Tensor | None
    q_b: torch.Tensor | None
    w_uk: torch.Tensor  # [heads, nope, latent]
    w_uv: torch.Tensor  # [heads, latent, v]
    out: torch.Tensor
    mlp: _Mlp


class Target:
    """A DeepSeek-V3-layout model in one dtype on one device; ``load`` reads a checkpoint folder."""

    def __init__(
        self,
        config: TargetConfig,
        tensors: dict[str, torch.Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        source: object = "target",
    ) -> None:
        """Check ``tensors`` against ``config`` (WeightsError, ConfigError) and prepare them."""
        config.check_computed(source)
        tensors = layout.renamed(tensors, "language_model.", source)
        weights.check(tensors, layout.target_shapes(config), layout.target_unused(config, tensors), source)
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        at = _Reader(tensors, dtype, self.device)
        self.embedding = at("model.embed_tokens.weight")
        self.head = self.embedding if config.tie_word_embeddings else at("lm_head.weight")
        self._norm = at("model.norm.weight")
        self._layers = [_layer(config, at, index) for index in range(config.num_hidden_layers)]
        self._turns = rotary.unit_circle(config.context, config.qk_rope_head_dim, config.rope_theta, self.device)

    @classmethod
    def load(
        cls,
        path: Path,
        config: TargetConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Target:
        """Read the checkpoint folder ``path``, or only its weights where ``config`` was read from it before.

        ConfigError or WeightsError, one line each.
        """
        return cls(config or TargetConfig.load(path), weights.load(path), dtype=dtype, device=device, source=path)

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1."""
        return self.config.vocab_size

    @property
    def context(self) -> int:
        """Positions are 0 .. context - 1."""
        return self.config.context

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, possibly none."""
        return self.config.eos_token_ids

    def new_pool(self, slots: int) -> torch.Tensor:
        """An uninitialised KV pool [layers, slots, row] in this model's dtype."""
        shape = (self.config.num_hidden_layers, slots, self.config.row)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        kv: list[torch.Tensor],
        attend: Attend,
        *,
        slots: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ids int64 [tokens] at positions int64 [tokens] (< context); the caller has checked their range.

        Each layer writes its KV rows to ``slots`` int64 [tokens] of its pool ``kv[layer]`` [slots, row] before it
        attends (none are written without ``slots``). Returns logits float32 [tokens or len(rows), vocab] and features
        [tokens, len(feature_layers) * hidden]: the residual stream after each of ``feature_layers``, in their order.
        """
        x = F.embedding(ids, self.embedding)
        turn = self._turns[positions]
        after: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            q, row = self._project(layer, self._rms(x, layer.norm_in), turn)
            if slots is not None:
                kv[index].index_copy_(0, slots, row)
            seen = attend(index, q, row, kv[index])
            values = torch.bmm(seen.transpose(0, 1), layer.w_uv).transpose(0, 1).flatten(1)
            x = x + F.linear(values, layer.out)
            x = x + self._mlp(layer.mlp, self._rms(x, layer.norm_out))
            if index in feature_layers:
                after[index] = x
        features = torch.cat([after[index] for index in feature_layers], -1) if feature_layers else x[:, :0]
        if rows is not None:
            x = x[rows]
        return F.linear(self._rms(x, self._norm), self.head).float(), features

    def _project(self, layer: _Layer, h: torch.Tensor, turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """h [tokens, hidden] -> absorbed queries [tokens, heads, row] and KV rows [tokens, row]."""
        c = self.config
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        mixed = F.linear(h, layer.inputs)
        if layer.q_b is not None and layer.norm_q is not None:
            lora = layer.norm_q.shape[0]
            q = F.linear(self._rms(mixed[:, :lora], layer.norm_q), layer.q_b)
            mixed = torch.cat([q, mixed[:, lora:]], -1)
        edge = heads * nope
        rotary_end = edge + (heads + 1) * rope
        rotated = rotary.rotate_pairs(mixed[:, edge:rotary_end].view(-1, heads + 1, rope), turn).to(mixed.dtype)
        latent = self._rms(mixed[:, rotary_end:], layer.norm_latent)
        absorbed = torch.bmm(mixed[:, :edge].view(-1, heads, nope).transpose(0, 1), layer.w_uk)
        q = torch.cat([absorbed.transpose(0, 1), rotated[:, :heads]], -1)
        return q, torch.cat([latent, rotated[:, heads]], -1)

    def _mlp(self, mlp: _Mlp, h: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(h, mlp.gate_up).chunk(2, -1)
        z = F.silu(gate) * up
        if mlp.router is not None and mlp.bias is not None:
            routing = self._route(mlp.router, mlp.bias, h).to(z.dtype)
            z = (z.view(*routing.shape, -1) * routing[:, :, None]).flatten(1)
        return F.linear(z, mlp.down)

    def _route(self, router: torch.Tensor, bias: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Routing weights float32 [tokens, experts + shared], zero for experts not chosen and one for shared ones."""
        c = self.config
        scores = F.linear(h.float(), router).sigmoid()
        chosen = (scores + bias).topk(c.num_experts_per_tok, -1, sorted=False).indices
        picked = scores.gather(1, chosen)
        if c.norm_topk_prob:
            picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
        if c.routed_scaling_factor != 1.0:
            picked = picked * c.routed_scaling_factor
        experts = scores.shape[1]
        routing = scores.new_ones(h.shape[0], experts + (c.n_shared_experts or 0))
        routing[:, :experts] = 0.0
        return routing.scatter_(1, chosen, picked)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


class _Reader:
    """Looks a tensor up by name and brings it to a dtype and device."""

    def __init__(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._tensors[name].to(device=self._device, dtype=dtype or self._dtype)


def _layer(config: TargetConfig, at: _Reader, index: int) -> _Layer:
    c, prefix = config, f"model.layers.{index}."
    attn = prefix + "self_attn."
    heads, nope, rope, latent = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
    lora = c.q_lora_rank is not None
    q = at(attn + ("q_b_proj.weight" if lora else "q_proj.weight")).view(heads, nope + rope, -1)
    q_rows = torch.cat([q[:, :nope].flatten(0, 1), _interleaved(c, q[:, nope:]).flatten(0, 1)])
    kv_a = at(attn + "kv_a_proj_with_mqa.weight")
    kv_rows = torch.cat([_interleaved(c, kv_a[None, latent:])[0], kv_a[:latent]])
    first = at(attn + "q_a_proj.weight") if lora else q_rows
    kv_b = at(attn + "kv_b_proj.weight").view(heads, nope + c.v_head_dim, latent)
    return _Layer(
        norm_in=at(prefix + "input_layernorm.weight"),
        norm_out=at(prefix + "post_attention_layernorm.weight"),
        norm_latent=at(attn + "kv_a_layernorm.weight"),
        inputs=torch.cat([first, kv_rows]),
        norm_q=at(attn + "q_a_layernorm.weight") if lora else None,
        q_b=q_rows if lora else None,
        w_uk=kv_b[:, :nope].contiguous(),
        w_uv=kv_b[:, nope:].transpose(1, 2).contiguous(),
        out=at(attn + "o_proj.weight"),
        mlp=_moe(c, at, prefix + "mlp.") if c.is_moe(index) else _dense(at, prefix + "mlp."),
    )


def _interleaved(config: TargetConfig, rows: torch.Tensor) -> torch.Tensor:
    """Rotary rows [heads, rope, in] with each pair adjacent; a checkpoint of halves (i, i + rope / 2) is reordered."""
    if config.rope_interleave:
        return rows
    heads, rope, width = rows.shape
    return rows.view(heads, 2, rope // 2, width).transpose(1, 2).reshape(heads, rope, width)


def _dense(at: _Reader, prefix: str) -> _Mlp:
    gate_up = torch.cat([at(prefix + "gate_proj.weight"), at(prefix + "up_proj.weight")])
    return _Mlp(gate_up, at(prefix + "down_proj.weight"))


def _moe(config: TargetConfig, at: _Reader, prefix: str) -> _Mlp:
    """Stack all experts, the shared one last: for a few tokens one dense GEMM beats gathering experts."""
    names = [f"{prefix}experts.{expert}." for expert in range(config.n_routed_experts or 0)]
    if config.n_shared_experts:
        names.append(prefix + "shared_experts.")
    gate = torch.cat([at(name + "gate_proj.weight") for name in names])
    up = torch.cat([at(name + "up_proj.weight") for name in names])
    return _Mlp(
        gate_up=torch.cat([gate, up]),
        down=torch.cat([at(name + "down_proj.weight") for name in names], 1),
        router=at(prefix + "gate.weight", torch.float32),
        bias=at(prefix + "gate.e_score_correction_bias", torch.float32),
    )
