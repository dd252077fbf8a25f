"""Which verify attention a step uses, and the record of how the two compare.

``off`` serves the baseline (the reference in fp32), ``on`` serves ours (the public operator: split-KV on a CPU, the
CUDA kernel on a GPU), ``validate`` runs both on the same inputs, serves the baseline and records their difference.
Prefill always uses the baseline: what is being judged is the verify call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from treeverify.engine.protocols import Attend
from treeverify.env import VerifyMode
from treeverify.errors import TreeverifyError
from treeverify.ops.tree_attention.api import tree_attention
from treeverify.ops.tree_attention.difference import Difference, compare
from treeverify.ops.tree_attention.reference import tree_attention_reference


@dataclass(frozen=True)
class VerifyBatch:
    """The part of a call that all layers share; tensors on the model's device.

    kv_indptr int64 [batch + 1], kv_indices int64 [>= kv_indptr[-1]], tree_bits int64 [batch, nodes, words] or None for
    a causal chain; ``request_ids`` [batch] name the requests for the record.
    """

    nodes: int
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    tree_bits: torch.Tensor | None
    request_ids: tuple[int, ...]


Implementation = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, VerifyBatch, float], tuple[torch.Tensor, torch.Tensor]
]
"""(q, draft_kv, kv_pool, batch, scale) -> (out [tokens, heads, 512] in q's dtype, lse float32 [tokens, heads])."""


def baseline(
    q: torch.Tensor, draft_kv: torch.Tensor, kv_pool: torch.Tensor, batch: VerifyBatch, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference, accumulating in fp32, rounded to q's dtype."""
    out, lse = tree_attention_reference(
        q,
        draft_kv,
        kv_pool,
        batch.kv_indptr,
        batch.kv_indices,
        nodes=batch.nodes,
        scale=scale,
        tree_bits=batch.tree_bits,
        dtype=torch.float32,
    )
    return out.to(q.dtype), lse


def ours(implementation: str | None) -> Implementation:
    """The public operator; ``implementation`` as ``tree_attention`` takes it (None: the device's first)."""

    def call(
        q: torch.Tensor, draft_kv: torch.Tensor, kv_pool: torch.Tensor, batch: VerifyBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return tree_attention(
            q,
            draft_kv,
            kv_pool,
            batch.kv_indptr,
            batch.kv_indices,
            nodes=batch.nodes,
            scale=scale,
            tree_bits=batch.tree_bits,
            implementation=implementation,
        )

    return call


@dataclass(frozen=True)
class WorstCase:
    """Where ours was furthest from the baseline."""

    layer: int
    request_id: int
    node: int
    head: int
    dim: int
    baseline: float
    ours: float

    def __str__(self) -> str:
        """Return ``layer 2, request 0, node 5, head 1, dim 17: baseline 0.5, ours 0.25``."""
        place = f"layer {self.layer}, request {self.request_id}, node {self.node}, head {self.head}, dim {self.dim}"
        return f"{place}: baseline {self.baseline:.9g}, ours {self.ours:.9g}"


@dataclass
class VerifyRecord:
    """What ``validate`` saw: one ``Difference`` per layer, ours against the baseline, and the worst element of all."""

    calls: int = 0  # attention calls compared, one per layer and step
    rows: int = 0  # (token, head) rows compared
    layers: dict[int, Difference] = field(default_factory=dict)
    worst: WorstCase | None = None
    max_lse_abs: float = 0.0
    failures: int = 0  # calls in which ours raised instead of answering
    last_failure: str = ""

    @property
    def total(self) -> Difference:
        """All layers together."""
        whole = Difference()
        for layer in sorted(self.layers):
            whole = whole.merge(self.layers[layer])
        return whole

    def add(self, layer: int, batch: VerifyBatch, difference: Difference, rows: int, lse_abs: float) -> None:
        """Add one compared call."""
        before = self.total
        self.calls += 1
        self.rows += rows
        self.layers[layer] = self.layers.get(layer, Difference()).merge(difference)
        self.max_lse_abs = max(self.max_lse_abs, lse_abs)
        found = difference.worst
        if found is not None and before.merge(difference).worst is not before.worst:
            request, node = divmod(found.token, batch.nodes)
            self.worst = WorstCase(
                layer, batch.request_ids[request], node, found.head, found.dim, found.expected, found.got
            )

    def fail(self, error: Exception) -> None:
        """Count one call in which ours raised."""
        self.failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"


class VerifyObserver(Protocol):
    """Is told of verify calls while they happen; a server counts with it."""

    def served(self, mode: VerifyMode, batch: VerifyBatch) -> None:
        """One verify forward (all layers) begins in ``mode``."""

    def compared(self, layer: int, batch: VerifyBatch, expected: torch.Tensor, got: torch.Tensor | None) -> None:
        """``validate`` has both results [tokens, heads, 512] of one layer; ``got`` is None where ours raised."""


class VerifyAttention:
    """Makes the ``attend`` of each forward, by mode; a change of ``mode`` holds from the next ``begin`` on."""

    def __init__(self, mode: VerifyMode, scale: float, mine: Implementation) -> None:
        """``mine``: what ``on`` serves and ``validate`` judges."""
        self.mode, self.record = mode, VerifyRecord()
        self._now = mode
        self.observer: VerifyObserver | None = None
        self._scale, self._mine = scale, mine

    def begin(self) -> None:
        """A step begins, which is served in one mode whatever its callbacks ask for."""
        self._now = self.mode

    def prefill(self, batch: VerifyBatch) -> Attend:
        """The baseline, whatever the mode."""
        return lambda layer, q, draft_kv, kv_pool: baseline(q, draft_kv, kv_pool, batch, self._scale)[0]

    def verify(self, batch: VerifyBatch) -> Attend:
        """What the step's mode says."""
        if self.observer is not None:
            self.observer.served(self._now, batch)
        if self._now is VerifyMode.OFF:
            return self.prefill(batch)
        if self._now is VerifyMode.ON:
            return lambda layer, q, draft_kv, kv_pool: self._mine(q, draft_kv, kv_pool, batch, self._scale)[0]
        return lambda layer, q, draft_kv, kv_pool: self._both(layer, q, draft_kv, kv_pool, batch)

    def _both(
        self, layer: int, q: torch.Tensor, draft_kv: torch.Tensor, kv_pool: torch.Tensor, batch: VerifyBatch
    ) -> torch.Tensor:
        served, lse = baseline(q, draft_kv, kv_pool, batch, self._scale)
        try:
            out, my_lse = self._mine(q, draft_kv, kv_pool, batch, self._scale)
            difference = compare(served, out)
            # Equal infinities (a node that sees nothing) differ by NaN; they agree.
            lse_abs = float((my_lse - lse).nan_to_num_(0.0).abs().max())
        except (TreeverifyError, RuntimeError) as error:  # a shadow that fails must not fail the served request
            self.record.fail(error)
            out = None
        else:
            self.record.add(layer, batch, difference, served.shape[0] * served.shape[1], lse_abs)
        if self.observer is not None:
            self.observer.compared(layer, batch, served, out)
        return served
