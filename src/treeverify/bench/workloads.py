"""The points of the attention benchmark, what each must move and compute at least, and inputs for them.

A *point* is (batch size, nodes, heads, prefix). The 31 points are those of ``benchmarks/anchors/h200-anchors.csv``. The
inputs are random: normal queries and KV rows, random trees, and slots that are scattered over a pool much larger than
the cache. A workload holds several *KV sets*, disjoint slots of one pool, so that calls in a row never find their rows
in L2.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from treeverify.errors import ConfigError

LATENT, ROW = 512, 576
ELEMENT_BYTES = 2  # bfloat16
SCALE = 192**-0.5
PAGE = 64
COLD_BYTES = 4 * 60 * 2**20
"""KV bytes that one graph touches at least: four times the 60 MB of an H200's L2."""
MAX_SETS = 256

RAGGED = "ragged"
RAGGED_PREFIXES = (3072, 16384, 1024, 8190, 65536, 2045, 4099, 12301, 1536, 32771, 1024, 4096, 8192, 2048, 6130, 1024)
"""The ragged point: 16 requests from 1k to 64k, in no order. The anchors' table does not name its lengths; these add up
to the 169,472 tokens that its floor implies.
"""

Indices = Literal["scatter", "contig", "page64"]


class Point(NamedTuple):
    """One row of the benchmark; ``prefix`` is the length of every request's prefix, or ``ragged``."""

    bs: int
    nodes: int
    heads: int
    prefix: int | str

    def __str__(self) -> str:
        """Write as in the tables: ``1/9/8/128k``."""
        prefix = self.prefix
        if isinstance(prefix, int) and prefix % 1024 == 0:
            prefix = f"{prefix // 1024}k"
        return f"{self.bs}/{self.nodes}/{self.heads}/{prefix}"

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Prefix length of each request."""
        if isinstance(self.prefix, int):
            return (self.prefix,) * self.bs
        return RAGGED_PREFIXES

    @property
    def kv_tokens(self) -> int:
        """KV rows that every implementation must read: prefixes and all draft rows."""
        return sum(self.prefixes) + self.bs * self.nodes

    @property
    def kv_bytes(self) -> int:
        """Bytes of those rows."""
        return self.kv_tokens * ROW * ELEMENT_BYTES

    @property
    def bytes(self) -> int:
        """Fewest bytes to move: each KV row and query read once, each output written once."""
        return self.kv_bytes + self.bs * self.nodes * self.heads * (ROW + LATENT) * ELEMENT_BYTES

    @property
    def flops(self) -> int:
        """Multiply-adds of both products, twice; the masked part of the draft columns counts as well."""
        return 2 * (ROW + LATENT) * self.nodes * self.heads * self.kv_tokens


def parse_point(text: str) -> Point:
    """Parse ``bs/nodes/heads/prefix`` as ``str(Point)`` writes it; raises ``ConfigError`` for anything else."""
    parts = text.strip().split("/")
    try:
        bs, nodes, heads = (int(part) for part in parts[:3])
        last = parts[3]
        prefix = RAGGED if last == RAGGED else int(last[:-1]) * 1024 if last.endswith("k") else int(last)
    except (ValueError, IndexError):
        raise ConfigError(f"point: expected bs/nodes/heads/prefix such as 1/9/8/128k, got {text!r}") from None
    if len(parts) != 4 or (prefix == RAGGED and bs != len(RAGGED_PREFIXES)):
        raise ConfigError(f"point: expected four numbers, and 16 requests where ragged; got {text!r}")
    return Point(bs, nodes, heads, prefix)


def load_points(anchors: Path) -> list[Point]:
    """Return the unique points of an anchors table in its order; raises ``ConfigError`` if it is missing."""
    if not anchors.is_file():
        raise ConfigError(f"anchors: no such file: {anchors}")
    with anchors.open(newline="", encoding="utf-8") as file:
        rows = [(row["bs"], row["q_len"], row["heads"], row["prefix"]) for row in csv.DictReader(file)]
    return [parse_point("/".join(row)) for row in dict.fromkeys(rows)]


@dataclass
class KvSet:
    """One call's KV: slots of the pool for each request, prefix and draft."""

    prefix_slots: torch.Tensor  # [sum of prefixes] int64
    draft_slots: torch.Tensor  # [bs * nodes] int64
    draft_kv: torch.Tensor  # [bs * nodes, 576]: the same rows, contiguous
    pages: torch.Tensor | None = None  # [bs, pages of the longest request] int32, page64 only


@dataclass
class Workload:
    """A point's inputs in one index layout, shaped as SGLang's target-verify call shapes them."""

    point: Point
    indices: Indices
    pool: torch.Tensor  # [slots, 576]
    q: torch.Tensor  # [bs * nodes, heads, 576]
    visible: torch.Tensor  # bool [bs, nodes, nodes], row = query
    mask: torch.Tensor  # uint8, flat: per request nodes x (P + nodes)
    mask_indptr: torch.Tensor  # int64 [bs + 1]
    kv_indptr: torch.Tensor  # int32 [bs + 1], prefixes only
    sets: list[KvSet] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.pool.device


def set_count(point: Point, slots: int) -> int:
    """Number of disjoint KV sets: enough to outgrow L2 several times, as many as fit into ``slots``."""
    cold = -(-COLD_BYTES // point.kv_bytes)
    fit = slots // _padded_tokens(point)
    if fit < 1:
        raise ConfigError(f"{point}: one KV set needs {_padded_tokens(point)} slots, the pool has {slots}")
    return max(1, min(max(2, cold), MAX_SETS, fit))


def pool_slots(points: Sequence[Point], max_sets: int | None = None) -> int:
    """Slots of a pool that holds two KV sets of the largest point, and enough of the small ones to outgrow L2."""
    wanted = (max(2, -(-COLD_BYTES // point.kv_bytes)) for point in points)
    sets = [min(count, max_sets or MAX_SETS, MAX_SETS) for count in wanted]
    return max(count * _padded_tokens(point) for count, point in zip(sets, points, strict=True))


def make_pool(slots: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """KV pool ``[slots, 576]`` of standard normal bfloat16 values."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(slots, ROW, device=device, dtype=torch.bfloat16, generator=generator)


def make_workload(
    point: Point, pool: torch.Tensor, indices: Indices, seed: int = 0, sets: int | None = None
) -> Workload:
    """Make queries, random trees, mask and KV sets for ``point`` over ``pool``."""
    device = pool.device
    generator = torch.Generator(device).manual_seed(seed + 1_000_003)  # the pool's own seed would repeat its rows as q
    shape = (point.bs * point.nodes, point.heads, ROW)
    q = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
    visible = torch.stack([random_visibility(point.nodes, seed + request) for request in range(point.bs)]).to(device)
    mask, mask_indptr = _mask(point, visible)
    prefix_ends = torch.tensor((0, *point.prefixes), device=device).cumsum(0)
    work = Workload(point, indices, pool, q, visible, mask, mask_indptr, prefix_ends.to(torch.int32))
    count = set_count(point, pool.shape[0]) if sets is None else sets
    page = PAGE if indices == "page64" else 1
    lengths = [-(-(prefix + point.nodes) // page) for prefix in point.prefixes]  # in pages
    total = pool.shape[0] // page
    if indices == "contig":
        order = torch.arange(total, device=device)
    else:
        order = torch.randperm(total, device=device, generator=generator)
    for number in range(count):
        begin = number * sum(lengths)
        rows = segments(order[begin : begin + sum(lengths)], lengths)
        work.sets.append(_kv_set(point, pool, rows, page))
    return work


def segments(values: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Cut ``values`` into views of these lengths."""
    ends = list(itertools.accumulate(lengths))
    return [values[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def random_visibility(nodes: int, seed: int) -> torch.Tensor:
    """bool ``[nodes, nodes]``: each node of a random tree sees itself and its ancestors; parents come first."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(node, (1,), generator=generator))
        visible[node] |= visible[parent]
    return visible


def _padded_tokens(point: Point) -> int:
    """Slots of one KV set when every request is rounded up to whole pages."""
    return sum(-(-(prefix + point.nodes) // PAGE) * PAGE for prefix in point.prefixes)


def _mask(point: Point, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = []
    for request, prefix in enumerate(point.prefixes):
        prefix_part = torch.ones(point.nodes, prefix, dtype=torch.uint8, device=visible.device)
        parts.append(torch.cat([prefix_part, visible[request].to(torch.uint8)], dim=1).flatten())
    ends = torch.tensor([0] + [part.numel() for part in parts], device=visible.device).cumsum(0)
    return torch.cat(parts), ends


def _kv_set(point: Point, pool: torch.Tensor, rows: list[torch.Tensor], page: int) -> KvSet:
    """``rows``: slots, or pages, of each request in order."""
    prefix_slots, draft_slots = [], []
    for prefix, own in zip(point.prefixes, rows, strict=True):
        slots = (own[:, None] * page + torch.arange(page, device=own.device)).flatten() if page > 1 else own
        prefix_slots.append(slots[:prefix])
        draft_slots.append(slots[prefix : prefix + point.nodes])
    draft = torch.cat(draft_slots)
    pages = None
    if page > 1:
        pages = torch.zeros(point.bs, max(own.numel() for own in rows), dtype=torch.int32, device=pool.device)
        for request, own in enumerate(rows):
            pages[request, : own.numel()] = own.to(torch.int32)
    return KvSet(torch.cat(prefix_slots), draft, pool[draft], pages)
