"""The DFlash drafter: one non-causal pass over [anchor, MASK x 7] given the target's features before the anchor.

As in SGLang: context keys and values come from hidden_norm(fc(features)) directly (no input_layernorm), rotary halves
(not interleaved), logits of block place d predict the token d after the anchor, through the target's own head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.layers import Parameters, rms, rotary, turn
from training.shapes import BLOCK, DrafterShape
from training.target import Target


class DraftLayer(Parameters):
    """Qwen3-style layer: grouped heads with q/k norm, SwiGLU."""

    def __init__(self, s: DrafterShape) -> None:
        super().__init__()
        self.s = s
        for name in ("norm_in", "norm_mid"):
            self.ones(name, s.hidden)
        self.ones("q_norm", s.head_dim)
        self.ones("k_norm", s.head_dim)
        self.matrix("q", s.heads * s.head_dim, s.hidden)
        self.matrix("k", s.kv_heads * s.head_dim, s.hidden)
        self.matrix("v", s.kv_heads * s.head_dim, s.hidden)
        self.matrix("out", s.hidden, s.heads * s.head_dim, std=0.01)
        self.matrix("gate_up", 2, s.width, s.hidden)
        self.matrix("down", 1, s.width, s.hidden, std=0.01)

    def forward(self, x: Tensor, context: Tensor, tables: tuple, mask: Tensor) -> Tensor:
        """x [batch, queries, hidden]; context [batch, tokens, hidden]; mask [queries, tokens + queries]."""
        s = self.s
        h = rms(x, self.norm_in)
        both = torch.cat([context, h], 1)
        q = rms(F.linear(h, self.q).unflatten(-1, (s.heads, -1)), self.q_norm)
        k = rms(F.linear(both, self.k).unflatten(-1, (s.kv_heads, -1)), self.k_norm)
        v = F.linear(both, self.v).unflatten(-1, (s.kv_heads, -1))
        q, k = turn(*q.chunk(2, -1), tables[0]), turn(*k.chunk(2, -1), tables[1])
        groups = s.heads // s.kv_heads
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.expand(x.shape[0], s.heads, -1, -1)
        )
        x = x + F.linear(o.transpose(1, 2).flatten(2), self.out)
        gate, up = F.linear(rms(x, self.norm_mid), self.gate_up.flatten(0, 1)).chunk(2, -1)
        return x + (F.silu(gate) * up) @ self.down.flatten(0, 1)


class Drafter(Parameters):
    """Target features and anchors to logits for the seven tokens after each anchor."""

    def __init__(self, s: DrafterShape) -> None:
        super().__init__()
        self.s = s
        self.matrix("fc", s.hidden, len(s.features) * s.hidden)
        self.ones("context_norm", s.hidden)
        self.ones("norm", s.hidden)
        self.matrix("mask", s.hidden, std=0.3)
        self.layers = nn.ModuleList([DraftLayer(s) for _ in range(s.layers)])

    def forward(self, target: Target, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Logits [batch, anchors, 7, vocab]; anchors [count] are positions shared by the rows of ids."""
        batch, tokens = ids.shape
        count, device = anchors.shape[0], ids.device
        context = rms(F.linear(features, self.fc), self.context_norm)
        first = F.embedding(ids[:, anchors], target.embedding)[:, :, None]
        x = torch.cat([first, self.mask.expand(batch, count, BLOCK - 1, -1)], 2).flatten(1, 2)
        places = (anchors[:, None] + torch.arange(BLOCK, device=device)).flatten()
        past = torch.arange(tokens, device=device)
        block = torch.arange(count, device=device).repeat_interleave(BLOCK)
        seen = torch.cat([past[None] < anchors.repeat_interleave(BLOCK)[:, None], block[None] == block[:, None]], 1)
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=device).masked_fill(~seen, -30000.0)
        tables = rotary(places, self.s.head_dim), rotary(torch.cat([past, places]), self.s.head_dim)
        for layer in self.layers:
            x = layer(x, context, tables, mask)
        x = x.unflatten(1, (count, BLOCK))[:, :, 1:]
        return F.linear(rms(x, self.norm), target.head)
