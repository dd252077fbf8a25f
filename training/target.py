"""The target: a small DeepSeek-V3-layout language model, for training and batched generation.

DeepSeek checkpoints interleave the rotary pairs (2i, 2i+1). The forward here reads them that way, so the exported
weights are used by Hugging Face and SGLang as they are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.layers import Parameters, rms, rotary, turn
from training.shapes import TargetShape


class Attention(Parameters):
    """Multi-head latent attention, expanded to plain heads (training needs no absorbed form)."""

    def __init__(self, s: TargetShape) -> None:
        super().__init__()
        self.s = s
        self.ones("kv_norm", s.latent)
        self.matrix("q", s.heads * (s.nope + s.rope), s.hidden)
        self.matrix("kv_a", s.latent + s.rope, s.hidden)
        self.matrix("kv_b", s.heads * (s.nope + s.value), s.latent)
        self.matrix("out", s.hidden, s.heads * s.value, std=0.01)

    def heads(self, h: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Project [batch, tokens, hidden] to queries, keys and values [batch, heads, tokens, dim]."""
        s, (batch, tokens, _) = self.s, h.shape
        q = F.linear(h, self.q).view(batch, tokens, s.heads, s.nope + s.rope)
        turned = q[..., s.nope :]
        q = torch.cat([q[..., : s.nope], turn(turned[..., 0::2], turned[..., 1::2], table)], -1)
        c = F.linear(h, self.kv_a)
        rope = c[..., None, s.latent :]
        rope = turn(rope[..., 0::2], rope[..., 1::2], table).expand(batch, tokens, s.heads, s.rope)
        kv = F.linear(rms(c[..., : s.latent], self.kv_norm), self.kv_b)
        kv = kv.view(batch, tokens, s.heads, s.nope + s.value)
        k = torch.cat([kv[..., : s.nope], rope], -1)
        v = F.pad(kv[..., s.nope :], (0, k.shape[-1] - s.value))  # equal dims let the flash kernel run
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Attention and output projection."""
        s = self.s
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=(s.nope + s.rope) ** -0.5)
        return F.linear(o[..., : s.value].transpose(1, 2).flatten(2), self.out)


class FeedForward(Parameters):
    """A dense SwiGLU, or 16 routed experts and a shared one as a single dense product times routing weights."""

    def __init__(self, s: TargetShape, moe: bool) -> None:
        super().__init__()
        self.s, self.moe = s, moe
        self.count = s.experts + 1 if moe else 1
        width = s.expert_width if moe else s.dense
        self.matrix("gate_up", 2 * self.count, width, s.hidden)
        self.matrix("down", self.count, width, s.hidden, std=0.01)
        if moe:
            self.matrix("router", s.experts, s.hidden, std=0.02)
            self.register_buffer("bias", torch.zeros(s.experts))
            self.load: Tensor | None = None

    def routing(self, h: Tensor) -> Tensor:
        """Weights [..., experts + 1]: the top 4 by biased score, normalised without the bias; the shared expert 1."""
        scores = torch.sigmoid(F.linear(h.float(), self.router.float()))
        chosen = (scores.detach() + self.bias).topk(self.s.per_token, -1).indices
        picked = scores.gather(-1, chosen)
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
        weights = torch.zeros_like(scores).scatter(-1, chosen, picked)
        if self.training:
            self.load = (weights.detach() > 0).float().sum((0, 1))
        return torch.cat([weights, torch.ones_like(weights[..., :1])], -1)

    def forward(self, h: Tensor) -> Tensor:
        """[batch, tokens, hidden] to the same."""
        gate, up = F.linear(h, self.gate_up.flatten(0, 1)).chunk(2, -1)
        z = F.silu(gate) * up
        if self.moe:
            z = (z.unflatten(-1, (self.count, -1)) * self.routing(h).to(z.dtype)[..., None]).flatten(-2)
        return z @ self.down.flatten(0, 1)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the routing bias towards equal load (auxiliary-loss-free balancing)."""
        if self.moe and self.load is not None:
            self.bias += rate * torch.sign(self.load.mean() - self.load)


class Block(Parameters):
    """Pre-norm attention and feed-forward on a residual stream."""

    def __init__(self, s: TargetShape, moe: bool) -> None:
        super().__init__()
        self.ones("norm_in", s.hidden)
        self.ones("norm_mid", s.hidden)
        self.attention = Attention(s)
        self.ff = FeedForward(s, moe)

    def rest(self, x: Tensor, attended: Tensor, drop: float) -> Tensor:
        """Add attention's output, then the feed-forward's."""
        x = x + F.dropout(attended, drop, self.training)
        return x + F.dropout(self.ff(rms(x, self.norm_mid)), drop, self.training)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], drop: float) -> Tensor:
        """One layer over whole sequences."""
        q, k, v = self.attention.heads(rms(x, self.norm_in), table)
        return self.rest(x, self.attention.attend(q, k, v, True), drop)


class Target(Parameters):
    """Token ids to logits, and the residual stream after chosen layers for the drafter."""

    def __init__(self, s: TargetShape, drop: float = 0.0) -> None:
        super().__init__()
        self.s, self.drop = s, drop
        self.matrix("embedding", s.vocab, s.hidden, std=0.1)
        self.matrix("head", s.vocab, s.hidden, std=0.02)
        self.ones("norm", s.hidden)
        self.layers = nn.ModuleList([Block(s, index > 0) for index in range(s.layers)])

    def forward(self, ids: Tensor, features: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits [batch, tokens, vocab] and concatenated features of the named layers."""
        x = F.dropout(F.embedding(ids, self.embedding), self.drop, self.training)
        table = rotary(torch.arange(ids.shape[1], device=ids.device), self.s.rope)
        kept = []
        for index, layer in enumerate(self.layers):
            x = layer(x, table, self.drop)
            if index in features:
                kept.append(x)
        return F.linear(rms(x, self.norm), self.head), torch.cat(kept, -1) if kept else None

    def lower(self, dtype: torch.dtype) -> "Target":
        """Turn the parameters to `dtype`; the routing biases stay float32, as their steps are too small for less."""
        biases = [layer.ff.bias for layer in self.layers if layer.ff.moe]
        self.to(dtype)
        for layer, bias in zip((layer for layer in self.layers if layer.ff.moe), biases, strict=True):
            layer.ff.bias = bias
        return self

    def balance(self, rate: float = 1e-3) -> None:
        """Balance the experts of every layer after a training step."""
        for layer in self.layers:
            layer.ff.balance(rate)

    @torch.no_grad()
    def generate(self, ids: Tensor, new: int, temperature: Tensor | None = None) -> Tensor:
        """Continue each row of ids by `new` tokens; temperature [batch], 0 or None is greedy."""
        s, (batch, prompt) = self.s, ids.shape
        shape = (batch, s.heads, prompt + new, s.nope + s.rope)
        keys = [self.head.new_zeros(shape) for _ in self.layers]
        values = [torch.zeros_like(k) for k in keys]
        out = F.pad(ids, (0, new))
        current, start = ids, 0
        for step in range(new):
            end = start + current.shape[1]
            table = rotary(torch.arange(start, end, device=ids.device), s.rope)
            x = F.embedding(current, self.embedding)
            for layer, key, value in zip(self.layers, keys, values, strict=True):
                q, k, v = layer.attention.heads(rms(x, layer.norm_in), table)
                key[:, :, start:end], value[:, :, start:end] = k, v
                x = layer.rest(x, layer.attention.attend(q, key[:, :, :end], value[:, :, :end], step == 0), 0.0)
            logits = F.linear(rms(x[:, -1], self.norm), self.head).float()
            current = pick(logits, temperature)[:, None]
            out[:, end], start = current[:, 0], end
        return out


def pick(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Argmax, or a Gumbel-max sample where the row's temperature is positive."""
    if temperature is None:
        return logits.argmax(-1)
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-9, 1 - 1e-7)))
    sampled = (logits / temperature.clamp(min=1e-3)[:, None] + noise).argmax(-1)
    return torch.where(temperature > 0, sampled, logits.argmax(-1))
