"""A verify call with made-up results, for tests of counters and dumps on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from treeverify.integrations.sglang.calls import Call
from treeverify.integrations.sglang.dump import Sizes
from treeverify.ops.tree_attention.reference import tree_attention_reference
from treeverify.tree.packing import pack_rows

NODES, HEADS, SLOTS, LONGEST = 5, 2, 80, 24
CPU = torch.device("cpu")
PARENTS = (-1, 0, 0, 1, 2)


def sizes(device: torch.device = CPU) -> Sizes:
    return Sizes(NODES, HEADS, LONGEST, torch.bfloat16, device)


def visible(nodes: int = NODES) -> torch.Tensor:
    seen = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(PARENTS[:nodes]):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def make_call(prefixes: Sequence[int] = (7, 3), form: str = "mask", nodes: int = NODES, layer: int = 2) -> Call:
    """A call over a pool that is NaN wherever no prefix names it; the mask's prefix columns hold garbage."""
    g = torch.Generator().manual_seed(sum(prefixes))
    tokens, total = nodes * len(prefixes), sum(prefixes)
    slots = torch.randperm(SLOTS - 1, generator=g)[:total] + 1
    pool = torch.full((SLOTS, 1, 576), torch.nan, dtype=torch.bfloat16)
    pool[slots] = torch.randn(total, 1, 576, generator=g).bfloat16()
    cells = [torch.cat([torch.ones(nodes, p, dtype=torch.bool), visible(nodes)], 1).flatten() for p in prefixes]
    bits = torch.from_numpy(pack_rows(visible(nodes).numpy()).view("int64")).expand(len(prefixes), -1, -1)
    return Call(
        q=torch.randn(tokens, HEADS, 576, generator=g).bfloat16(),
        draft_kv=torch.randn(tokens, 1, 576, generator=g).bfloat16(),
        kv_pool=pool,
        kv_indptr=torch.tensor([0, *prefixes]).cumsum(0).to(torch.int32),
        kv_indices=torch.cat([slots, torch.full((9,), 10**9)]),  # beyond kv_indptr[-1]: never to be read
        mask=torch.cat(cells).to(torch.uint8) if form == "mask" else None,
        mask_indptr=torch.tensor([0, *(nodes * (p + nodes) for p in prefixes)]).cumsum(0) if form == "mask" else None,
        tree_bits=bits.contiguous() if form == "bits" else None,
        slots=torch.arange(tokens) + 1,
        nodes=nodes,
        scale=192**-0.5,
        layer=layer,
    )


def results(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded reference, twice: as the baseline's result and as ours."""
    names = ("nodes", "scale", "mask", "mask_indptr", "tree_bits")
    options = {name: getattr(call, name) for name in names}
    out, _ = tree_attention_reference(*call[:5], **options)
    return out.bfloat16(), out.bfloat16()
