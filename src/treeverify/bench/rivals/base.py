"""What an adapter offers to the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from treeverify.bench.workloads import Indices, Workload, segments
from treeverify.errors import TreeverifyError

Call = Callable[[], torch.Tensor]
"""One attention call on one KV set; returns its output, ``[bs * nodes, heads, 512]`` or a view of that shape.

A call owns every tensor that it uses: whoever holds the call may replay its graph.
"""

MOST_CALL_US = 60_000.0
"""A call that takes longer is not timed."""


class TooSlowError(TreeverifyError):
    """A call takes, or would take, longer than ``MOST_CALL_US``."""

    def __init__(self, how: str, us: float) -> None:
        """``how``: estimated or measured."""
        super().__init__(f"{how} {us / 1e3:.0f} ms per call, the limit is {MOST_CALL_US / 1e3:.0f} ms")


@dataclass(frozen=True)
class Implementation:
    """An implementation that loaded."""

    name: str
    indices: tuple[Indices, ...]
    """Index layouts that it is timed with."""
    tree: bool
    """True: it computes the tree mask. False: it only knows the causal chain, and is judged by that."""
    prepare: Callable[[Workload], list[Call]]
    """Set up everything that a server sets up once per step, and return one call per KV set."""
    version: str = ""


@dataclass(frozen=True)
class Missing:
    """An implementation that is not available here, and why."""

    name: str
    reason: str


def lengths(work: Workload, *, with_draft: bool) -> torch.Tensor:
    """KV length of each request, int32 ``[bs]``."""
    extra = work.point.nodes if with_draft else 0
    return torch.tensor([prefix + extra for prefix in work.point.prefixes], dtype=torch.int32, device=work.device)


def starts(counts: torch.Tensor) -> torch.Tensor:
    """Offsets int32 ``[n + 1]`` of segments of these lengths."""
    zero = torch.zeros(1, dtype=torch.int32, device=counts.device)
    return torch.cat([zero, counts.cumsum(0).to(torch.int32)])


def query_starts(work: Workload, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Offsets ``[bs + 1]`` of the requests' queries."""
    point = work.point
    return torch.arange(0, point.bs * point.nodes + 1, point.nodes, dtype=dtype, device=work.device)


def request_slots(work: Workload, number: int, *, with_draft: bool) -> list[torch.Tensor]:
    """Slots of each request in KV set ``number``: its prefix, then its draft nodes if asked for."""
    kv = work.sets[number]
    prefixes = segments(kv.prefix_slots, work.point.prefixes)
    if not with_draft:
        return prefixes
    return [torch.cat(pair) for pair in zip(prefixes, kv.draft_slots.view(-1, work.point.nodes), strict=True)]


def slot_table(rows: list[torch.Tensor]) -> torch.Tensor:
    """int32 table ``[bs, longest]`` of slots, padded with slot 0."""
    table = torch.zeros(len(rows), max(row.numel() for row in rows), dtype=torch.int32, device=rows[0].device)
    for index, row in enumerate(rows):
        table[index, : row.numel()] = row.to(torch.int32)
    return table
