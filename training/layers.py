"""Pieces that target and drafter share: parameters with an initial scale, RMSNorm, rotary tables."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Parameters(nn.Module):
    """A module whose parameters are declared by name and shape."""

    def matrix(self, name: str, *shape: int, std: float | None = None) -> None:
        """Declare a normal-initialised parameter; the default scale keeps the variance of its input."""
        scale = shape[-1] ** -0.5 if std is None else std
        setattr(self, name, nn.Parameter(torch.randn(*shape) * scale))

    def ones(self, name: str, size: int) -> None:
        """Declare a norm's weight."""
        setattr(self, name, nn.Parameter(torch.ones(size)))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rotary(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, 1, dim / 2] in float32."""
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None, None] * 10000.0 ** (-steps / dim)
    return angles.cos(), angles.sin()


def turn(first: Tensor, second: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (first, second) and lay the results out as two halves."""
    cos, sin = table
    a, b = first.float(), second.float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(first.dtype)


def mebibytes(module: nn.Module) -> float:
    """Size of a module's parameters in bfloat16."""
    return sum(p.numel() for p in module.parameters()) * 2 / 2**20
