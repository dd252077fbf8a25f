"""Differences between two attention outputs, accumulated on the device: nothing here waits for it unless asked.

Plain torch operations on preallocated tensors, so a graph that captured ``record`` counts at every replay: some 45
small kernels a call. A row is one (node, head). ULP is the spacing of bfloat16 at the row's largest expected
magnitude, as ``max_row_ulp`` of ``ops.tree_attention.difference``, which compares on the host and says more. Rows that
pad a CUDA graph are left out. An element of which one is NaN or infinite and the other is not the same makes its row
mismatched; elements that are not finite count in no other figure.

All figures lie in one int64 tensor, so that a snapshot is one copy. A peak is kept as (bits of the float32) * 2**32 +
(node * heads + head): floats >= 0 order as their bits do, so the largest number carries the row that it came from.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, TypedDict

import torch

from treeverify.env import VerifyMode
from treeverify.errors import ContractError
from treeverify.integrations.sglang.host_copy import HostCopy
from treeverify.observe.bounds import BOUND_ULP
from treeverify.ops.tree_attention.difference import ROW_EDGES

__all__ = ["BOUND_ULP", "EDGES", "MISMATCHED", "Counters", "Figures"]

EDGES = ROW_EDGES
"""Bin 0 counts rows that agree exactly, bin i those in (EDGES[i-1], EDGES[i]] ULP, the last one everything beyond."""
MISMATCHED = float(torch.finfo(torch.float32).max)
"""Score of a mismatched row: beyond every bound. Also the cap of every figure, since JSON has no infinity."""
_FRACTION_BITS = 7
_SMALLEST = 2.0**-126
_EXPONENT = 0x7F800000
"""The exponent field of a float32: what is left of a number is the power of two below it."""
_MODES = tuple(VerifyMode)


class _Column(IntEnum):
    """Columns of a layer's figures; the histogram follows."""

    ABS = 0
    RELATIVE = 1
    ULP = 2
    CALLS = 3
    BREACHES = 4
    MISMATCHED = 5
    HISTOGRAM = 6


class Figures(TypedDict):
    """What was counted, in the fields of ``control.schema.BackendState``."""

    layers: list[dict[str, Any]]
    """``LayerCounts`` of each layer that was compared."""
    served: dict[str, dict[str, int]]
    """``ModeCounts`` by mode."""
    breaches: int


class Counters:
    """Figures of one backend: differences per layer, and calls and rows by mode.

    ``layers`` is one more than the largest layer number; ``nodes`` and ``heads`` are the most that a call may have.
    """

    def __init__(self, layers: int, nodes: int, heads: int, device: torch.device) -> None:
        width = _Column.HISTOGRAM + len(EDGES) + 1
        self._all = torch.zeros(layers * width + 2 * len(_MODES), dtype=torch.int64, device=device)
        self._layers = self._all[: layers * width].view(layers, width)
        self._served = self._all[layers * width :].view(len(_MODES), 2)
        self._edges = torch.tensor(EDGES, device=device)
        self._rows = torch.arange(nodes * heads, device=device)
        self._heads = heads
        self._copy = HostCopy(self._all)

    def count(self, mode: VerifyMode, live: torch.Tensor, heads: int) -> None:
        """Count one verify pass of ``live [tokens]`` (bool) rows times ``heads``: once per step, not per layer.

        A pass without a live row is a warm-up or the capture of a graph, and is not counted.
        """
        served = self._served[_MODES.index(mode)]
        served[0].add_(live.any())
        served[1].add_(live.sum(), alpha=heads)

    def record(
        self, layer: int, expected: torch.Tensor, got: torch.Tensor, live: torch.Tensor, nodes: int
    ) -> torch.Tensor:
        """Add how far ``got [batch*nodes, heads, dim]`` is from ``expected``, rows that are not ``live`` left out.

        Returns ``score [batch*nodes, heads]`` float32: the error of each row in ULP, ``MISMATCHED`` for a mismatched
        row, 0 for padding. A call with a score beyond ``BOUND_ULP`` is counted as a breach; one without a live row is
        not counted.

        Raises ``ContractError`` for other heads or more nodes than this was made for.
        """
        tokens, heads = expected.shape[:2]
        if heads != self._heads or nodes * heads > self._rows.numel() or tokens % nodes:
            made = f"batch * (nodes <= {self._rows.numel() // self._heads}) tokens, {self._heads} heads"
            raise ContractError.of("Counters.record", "shape", made, f"{tokens} tokens of {nodes} nodes, {heads} heads")
        figures, padding = self._layers[layer], ~live[:, None]
        broken, peaks = _compare(expected, got)
        peaks.masked_fill_(padding, 0.0)
        broken.masked_fill_(padding, False)
        ulp = peaks[_Column.ULP]
        keyed = torch.add(self._rows[: nodes * heads], peaks.view(torch.int32).view(3, -1, nodes * heads), alpha=2**32)
        torch.maximum(figures[:3], keyed.amax((1, 2)), out=figures[:3])
        score = ulp.masked_fill(broken, MISMATCHED)
        figures[_Column.CALLS].add_(live.any())  # not the warm-up of a graph, nor a rank without requests
        figures[_Column.BREACHES].add_((score > BOUND_ULP).any())
        figures[_Column.MISMATCHED].add_(broken.sum())
        bins = torch.bucketize(ulp, self._edges).flatten()
        counted = live[:, None].expand(tokens, heads).flatten().to(torch.int64)
        figures[_Column.HISTOGRAM :].scatter_add_(0, bins, counted)
        return score

    def snapshot(self) -> None:
        """Start copying the figures to the host on the current stream, unless a copy is under way. Never waits."""
        self._copy.start()

    def read(self, wait: bool = True) -> Figures:
        """Return the figures: up to now, for which it waits for the device, or else those of the newest snapshot.

        Without a finished snapshot, and before the first call, there are no layers and all counts are 0.
        """
        values = self._copy.now() if wait else self._copy.latest()
        rows = values[: self._layers.numel()].view(self._layers.shape).tolist()
        served = values[self._layers.numel() :].view(self._served.shape).tolist()
        return {
            "layers": [self._layer(number, row) for number, row in enumerate(rows) if row[_Column.CALLS]],
            "served": {
                str(mode): {"calls": calls, "rows": rows} for mode, (calls, rows) in zip(_MODES, served, strict=True)
            },
            "breaches": sum(row[_Column.BREACHES] for row in rows),
        }

    def _layer(self, number: int, row: list[int]) -> dict[str, Any]:
        histogram = row[_Column.HISTOGRAM :]
        ulp, place = _peak(row[_Column.ULP])
        return {
            "layer": number,
            "calls": row[_Column.CALLS],
            "rows": sum(histogram),
            "mismatched_rows": row[_Column.MISMATCHED],
            "max_abs": _peak(row[_Column.ABS])[0],
            "max_row_ulp": ulp,
            "max_relative": _peak(row[_Column.RELATIVE])[0],
            "worst_node": place // self._heads if ulp else -1,
            "worst_head": place % self._heads if ulp else -1,
            "histogram": histogram,
        }


def _compare(expected: torch.Tensor, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``broken [tokens, heads]`` (rows with a mismatched element) and ``peaks [3, tokens, heads]`` float32.

    The peaks of a row, in the order of the columns: largest absolute error, norm of the error over the expected norm,
    error in ULP. A row whose expected norm is under 2**-126 counts as having that norm.
    """
    want, have = expected.float(), got.float()
    error = (have - want).abs_()
    odd = (error < torch.inf).logical_not_()  # NaN or infinity in one or both
    lesser = torch.fmin(want, have)  # NaN only where both are
    broken = ((want != have) & (lesser == lesser) & odd).any(-1)
    # masked_fill, not where: a scalar operand of where may be copied from the host, which a capture forbids
    error.masked_fill_(odd, 0.0)
    want = want.masked_fill(odd, 0.0)
    norm = torch.linalg.vector_norm
    largest, expected_norm = norm(want, torch.inf, dim=-1), norm(want, dim=-1).clamp_(min=_SMALLEST)
    absolute = norm(error, torch.inf, dim=-1)
    ulp = absolute / _power(largest) * 2**_FRACTION_BITS  # in this order: an ULP itself may be subnormal
    peaks = torch.stack([absolute, norm(error, dim=-1) / expected_norm, ulp])
    return broken, peaks.nan_to_num_(nan=MISMATCHED, posinf=MISMATCHED)  # norms of values beyond 1e19 overflow


def _power(magnitude: torch.Tensor) -> torch.Tensor:
    """The power of two at or below ``magnitude``, 2**-126 at the least: one ULP of bfloat16 is 2**-7 of it."""
    return (magnitude.clamp(min=_SMALLEST).view(torch.int32) & _EXPONENT).view(torch.float32)


def _peak(key: int) -> tuple[float, int]:
    """Split a key into its float and its row."""
    (value,) = struct.unpack("<f", struct.pack("<I", key >> 32))
    return value, key & 0xFFFFFFFF
