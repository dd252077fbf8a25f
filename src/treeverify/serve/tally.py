"""Counts what the engine's verify calls did, in the figures of the plugin's state (``control.schema``)."""

from __future__ import annotations

from collections import defaultdict

import torch

from treeverify.control.schema import BackendState, LayerCounts, ModeCounts, Shape
from treeverify.engine.verify import VerifyBatch
from treeverify.env import VerifyMode
from treeverify.observe.bounds import BOUND_ULP
from treeverify.ops.tree_attention.difference import Difference, compare

MISMATCHED = float(torch.finfo(torch.float32).max)
"""Stands for an infinite figure: JSON has none."""


class Tally:
    """An observer of verify calls (``engine.verify.VerifyObserver``); one thread writes and reads it."""

    def __init__(self, heads: int, kernel: str, device: torch.device) -> None:
        """``heads`` of the model, ``kernel``: what the operator calls ours."""
        self._heads, self._kernel, self._device = heads, kernel, device
        self._calls: dict[VerifyMode, int] = dict.fromkeys(VerifyMode, 0)
        self._rows: dict[VerifyMode, int] = dict.fromkeys(VerifyMode, 0)
        self._shapes: dict[tuple[int, int, str], set[VerifyMode]] = defaultdict(set)
        self._layers: dict[int, _Layer] = {}
        self._breaches = 0

    def served(self, mode: VerifyMode, batch: VerifyBatch) -> None:
        """Count one verify forward and its shape."""
        requests = len(batch.request_ids)
        self._calls[mode] += 1
        self._rows[mode] += requests * batch.nodes * self._heads
        mask = "none" if batch.tree_bits is None else str(batch.tree_bits.dtype).removeprefix("torch.")
        self._shapes[requests, batch.nodes, mask].add(mode)

    def compared(self, layer: int, batch: VerifyBatch, expected: torch.Tensor, got: torch.Tensor | None) -> None:
        """Add one layer's comparison; a call that raised counts as mismatched in every row."""
        found = compare(expected, torch.full_like(expected, float("nan")) if got is None else got, unit=torch.bfloat16)
        self._layers.setdefault(layer, _Layer()).add(found, batch.nodes)
        self._breaches += found.mismatched_rows > 0 or found.max_row_ulp > BOUND_ULP

    def state(self) -> BackendState:
        """Everything counted so far."""
        shapes = [
            Shape(requests=requests, nodes=nodes, heads=self._heads, mask=mask, modes=sorted(modes))
            for (requests, nodes, mask), modes in sorted(self._shapes.items())
        ]
        return BackendState(
            kernel=self._kernel,
            device=str(self._device),
            heads=self._heads,
            nodes=max((shape.nodes for shape in shapes), default=1),
            bound_ulp=BOUND_ULP,
            breaches=self._breaches,
            dumps=0,
            shapes=shapes,
            left_to_parent={},
            served={mode.value: ModeCounts(calls=self._calls[mode], rows=self._rows[mode]) for mode in VerifyMode},
            layers=[self._layers[layer].counts(layer) for layer in sorted(self._layers)],
        )


class _Layer:
    """One layer's differences, and node and head of its worst row."""

    def __init__(self) -> None:
        self._total = Difference()
        self._node, self._head = -1, -1

    def add(self, found: Difference, nodes: int) -> None:
        merged = self._total.merge(found)
        if merged.worst is not None and merged.worst is not self._total.worst:
            self._node, self._head = merged.worst.token % nodes, merged.worst.head
        self._total = merged

    def counts(self, layer: int) -> LayerCounts:
        total = self._total
        return LayerCounts(
            layer=layer,
            calls=total.calls,
            rows=total.rows,
            mismatched_rows=total.mismatched_rows,
            max_abs=min(total.max_abs, MISMATCHED),
            max_row_ulp=min(total.max_row_ulp, MISMATCHED),
            max_relative=min(total.max_relative, MISMATCHED),
            worst_node=self._node,
            worst_head=self._head,
            histogram=list(total.row_histogram),
        )
