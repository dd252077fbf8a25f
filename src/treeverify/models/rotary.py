"""Rotary position tables, as Hugging Face and SGLang compute them (fp32 angles), and the two ways to apply them."""

from __future__ import annotations

import torch


def angles(context: int, dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Angles float32 [context, dim / 2]; computed in fp32 like both servers, so that late positions agree with them."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return torch.arange(context, dtype=torch.float32, device=device)[:, None] / (theta**exponents)


def unit_circle(context: int, dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Complex64 [context, 1, dim / 2]: cos + i sin, ready to multiply interleaved pairs [tokens, heads, dim / 2]."""
    angle = angles(context, dim, theta, device)
    return torch.polar(torch.ones_like(angle), angle)[:, None]


def rotate_pairs(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotate DeepSeek's interleaved pairs (0, 1), (2, 3), ... of x [tokens, heads, dim] by turn [tokens, 1, dim / 2].

    The result is float32 and keeps the pairs interleaved, which is what SGLang's KV rows hold. (Hugging Face reorders
    them to halves; queries and keys alike, so no dot product differs.)
    """
    pairs = torch.view_as_complex(x.float().contiguous().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


def halves(context: int, dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and signed sin, each float32 [context, 1, dim], for rotate_halves (the first half of sin is negated)."""
    angle = angles(context, dim, theta, device)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + dim / 2) of x [tokens, heads, dim], Qwen's and the drafter's layout; the dtype is kept."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return (x * cos + swapped * sin).to(x.dtype)
