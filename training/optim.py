"""Muon for matrices, AdamW for embeddings, head, router and norms; float32 masters behind low-precision weights."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PLAIN = ("embedding", "head", "router", "mask")


def orthogonalise(gradient: Tensor) -> Tensor:
    """Five Newton-Schulz steps on a stack of matrices (Muon's quintic)."""
    x = gradient.to(torch.bfloat16) if gradient.is_cuda else gradient
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        m = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * m + 2.0315 * (m @ m)) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Optimiser:
    """Build it on the float32 module; afterwards the module may be turned to a lower precision."""

    def __init__(self, module: nn.Module, rate: float, decay: float, plain_rate: float) -> None:
        self.rate, self.decay, self.plain_rate = rate, decay, plain_rate
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        self.plain: list[nn.Parameter] = []
        for name, p in module.named_parameters():
            if p.dim() >= 2 and name.split(".")[-1] not in PLAIN:
                self.groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
            else:
                self.plain.append(p)
        self.masters = {k: torch.cat([p.detach().float().reshape(-1, *k) for p in ps]) for k, ps in self.groups.items()}
        self.momenta = {k: torch.zeros_like(w) for k, w in self.masters.items()}
        self.plain_masters = [p.detach().float().clone().requires_grad_() for p in self.plain]
        fused = self.plain[0].is_cuda
        self.adam = torch.optim.AdamW(
            self.plain_masters, lr=plain_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
        )

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply and clear the gradients; `factor` scales both learning rates."""
        for k, ps in self.groups.items():
            g = torch.cat([p.grad.reshape(-1, *k) for p in ps]).float()
            momentum, master, rate = self.momenta[k], self.masters[k], self.rate * factor
            momentum.lerp_(g, 0.05)
            update = orthogonalise(g.lerp(momentum, 0.95))
            master.mul_(1 - rate * self.decay).add_(update, alpha=-rate * 0.2 * max(k) ** 0.5)
            pieces = master.split([p.numel() // (k[0] * k[1]) for p in ps])
            torch._foreach_copy_([p.data for p in ps], [m.view(p.shape) for m, p in zip(pieces, ps, strict=True)])
        for p, master in zip(self.plain, self.plain_masters, strict=True):
            master.grad = p.grad.float()
        for group in self.adam.param_groups:
            group["lr"] = self.plain_rate * factor
        self.adam.step()
        torch._foreach_copy_([p.data for p in self.plain], [m.data for m in self.plain_masters])
        for p in [p for ps in self.groups.values() for p in ps] + self.plain:
            p.grad = None


@dataclass
class Clock:
    """Progress from 0 to 1 by elapsed seconds, or by steps where they run out first."""

    seconds: float
    steps: int

    def __post_init__(self) -> None:
        self.start, self.done = time.perf_counter(), 0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    @property
    def progress(self) -> float:
        """Fraction of the training that is over."""
        return max(self.elapsed / self.seconds, self.done / self.steps)

    @property
    def factor(self) -> float:
        """Learning-rate factor: 2% warm-up, then a cosine down to 2%."""
        warm, f = 0.02, self.progress
        if f < warm:
            return max(f, 1e-3) / warm
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (min(f, 1.0) - warm) / (1 - warm)))
