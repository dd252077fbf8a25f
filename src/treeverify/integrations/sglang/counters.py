"""Differences between two attention outputs, accumulated on the device: nothing here waits for it.

Plain torch operations on preallocated tensors, so a CUDA graph that captured ``record`` counts at every replay. The
row is one (node, head). ULP is the spacing of bfloat16 at the row's largest expected magnitude, as ``max_row_ulp`` of
``ops.tree_attention.difference``, which compares on the host and says more. Rows that pad a CUDA graph are left out.
"""

from __future__ import annotations

import torch

EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Bin 0 counts rows that agree exactly, bin i those in (EDGES[i-1], EDGES[i]] ULP, the last one everything beyond."""
_FRACTION_BITS = 7
_SMALLEST = 2.0**-126
_EXPONENT = 0x7F800000
"""The exponent field of a float32: what is left of a number is the power of two below it."""


class Counters:
    """Per layer: calls, rows, largest errors, rows with a mismatched NaN or infinity, histogram of row errors."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._edges = torch.tensor(EDGES, device=device)
        self._calls, self._rows, self._mismatched = (
            torch.zeros(layers, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._max_abs, self._max_ulp = (torch.zeros(layers, device=device) for _ in range(2))
        self._histogram = torch.zeros(layers, len(EDGES) + 1, dtype=torch.int64, device=device)

    def count(self, layer: int, live: torch.Tensor, heads: int) -> None:
        """Count one call of ``live [tokens]`` (bool) rows times ``heads``."""
        self._calls[layer].add_(1)
        self._rows[layer].add_(live.sum() * heads)

    def record(self, layer: int, expected: torch.Tensor, got: torch.Tensor, live: torch.Tensor) -> None:
        """Count one call and add how far ``got [tokens, heads, dim]`` is from ``expected``."""
        self.count(layer, live, expected.shape[1])
        want, have = expected.float(), got.float()
        finite = want.isfinite() & have.isfinite()
        same = (want == have) | (want.isnan() & have.isnan())
        counted = live[:, None]
        self._mismatched[layer].add_(((~finite & ~same).any(-1) & counted).sum())
        # masked_fill, not where: a scalar operand of where may be copied from the host, which a capture forbids
        error = (have - want).abs().masked_fill(~finite, 0.0).amax(-1).masked_fill(~counted, 0.0)
        largest = want.abs().masked_fill(~finite, 0.0).amax(-1)
        ulp = error / _spacing(largest)
        torch.maximum(self._max_abs[layer], error.amax(), out=self._max_abs[layer])
        torch.maximum(self._max_ulp[layer], ulp.amax(), out=self._max_ulp[layer])
        bins = torch.bucketize(ulp, self._edges)
        self._histogram[layer].scatter_add_(0, bins.flatten(), counted.expand_as(bins).flatten().to(torch.int64))

    def read(self) -> list[dict[str, object]]:
        """Return the figures of each layer that was called. Waits for the device."""
        if self._calls.device.type == "cuda":
            torch.cuda.synchronize(self._calls.device)
        return [
            {
                "layer": layer,
                "calls": calls,
                "rows": int(self._rows[layer]),
                "mismatched_rows": int(self._mismatched[layer]),
                "max_abs": float(self._max_abs[layer]),
                "max_row_ulp": float(self._max_ulp[layer]),
                "histogram": self._histogram[layer].tolist(),
            }
            for layer, calls in enumerate(self._calls.tolist())
            if calls
        ]


def _spacing(magnitude: torch.Tensor) -> torch.Tensor:
    """Distance of neighbouring bfloat16 values at ``magnitude``; that of the smallest normal number at 0."""
    power = (magnitude.clamp(min=_SMALLEST).view(torch.int32) & _EXPONENT).view(torch.float32)
    return power * 2.0**-_FRACTION_BITS
