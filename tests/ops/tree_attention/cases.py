"""Hostile calls of tree_attention and their judge, shared by CPU and CUDA tests; builders take a device.

Every pool row that no index names holds poison, slot 0 included; slots are scattered; rows of q, draft_kv and kv_pool
are views with a wider stride whose gaps hold poison; prefix columns of the mask, cells round it, index entries past
kv_indptr[-1] and tree bits at or above ``nodes`` hold garbage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from treeverify.ops.tree_attention.contract import LSE_ERROR, RELATIVE_ERROR_FLAT, ROW, Options
from treeverify.ops.tree_attention.reference import tree_attention_reference

SCALE = 192**-0.5
GUARD = 64
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One call: the five tensors, the options, and what the options' mask means."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    options: Options
    prefixes: tuple[int, ...]
    visible: torch.Tensor
    """bool [batch, nodes, nodes]"""

    def run(self, function: Callable[..., tuple[torch.Tensor, torch.Tensor]], **more: object):
        return function(*self.tensors, **{**self.options, **more})

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The float64 reference's result, computed on the host."""
        options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        return tree_attention_reference(*(t.cpu() for t in self.tensors), **options)

    def with_options(self, **more: object) -> Case:
        return replace(self, options={**self.options, **more})


def assert_matches(case: Case, got: tuple[torch.Tensor, torch.Tensor], exact=None, bound: float | None = None) -> None:
    """Same NaN/-inf pattern; whole relative error within the contract's tolerance, each row within four times that."""
    out, lse = (t.detach().cpu().double() for t in got)
    want, want_lse = (t.detach().cpu().double() for t in (case.exact() if exact is None else exact))
    dtype = case.tensors[0].dtype
    bound = RELATIVE_ERROR_FLAT[dtype] if bound is None else bound
    assert out.isfinite().all(), f"{int((~out.isfinite()).sum())} elements are not finite"
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    blind = want_lse == -torch.inf
    assert not out[blind].any(), "a node that sees nothing must give 0"
    if want.norm() > 0:
        whole = float((out - want).norm() / want.norm())
        rows = (out - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
        worst = int(rows.argmax())
        place = divmod(worst, out.shape[1])
        assert whole <= bound, f"relative error {whole:.3g} > {bound:.3g}"
        assert rows.flatten()[worst] <= 4 * bound, f"row (token, head) {place}: {float(rows.max()):.3g}"
    error = ((lse - want_lse).abs() / want_lse.abs().clamp(min=1.0))[~blind]
    assert not error.numel() or error.max() <= LSE_ERROR[dtype], f"LSE error {float(error.max()):.3g}"


def random_tree(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """Ancestor-or-self matrix, bool [nodes, nodes], of a random tree in topological order."""
    visible = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(0, node, (1,), generator=generator))
        visible[node] |= visible[parent]
    return visible


def pack_bits(visible: torch.Tensor, garbage: bool = True) -> torch.Tensor:
    """int64 [batch, nodes, words]; bits at or above ``nodes`` are set if ``garbage``."""
    batch, nodes, _ = visible.shape
    words = (nodes + 63) // 64
    padded = torch.full((batch, nodes, 64 * words), garbage, dtype=torch.bool)
    padded[..., :nodes] = visible
    powers = torch.tensor([1 << bit if bit < 63 else -(1 << 63) for bit in range(64)])
    return torch.where(padded.view(batch, nodes, words, 64), powers, 0).sum(-1)


def flat_mask(visible: torch.Tensor, prefixes: Sequence[int], dtype: torch.dtype, generator: torch.Generator):
    """Mask (a view between guard cells) and int64 indptr; prefix columns and guards hold random bytes."""
    batch, nodes, _ = visible.shape
    indptr = torch.tensor([0, *itertools.accumulate(nodes * (p + nodes) for p in prefixes)])
    size = int(indptr[-1])
    buffer = torch.randint(0, 256, (size + 2 * GUARD,), dtype=torch.uint8, generator=generator)
    mask = buffer[GUARD : GUARD + size]
    for request in range(batch):
        rows = mask[indptr[request] : indptr[request + 1]].view(nodes, prefixes[request] + nodes)
        rows[:, prefixes[request] :] = visible[request].to(torch.uint8)
    return mask.view(dtype), indptr


def padded_rows(rows: torch.Tensor, pad: int, poison: float) -> torch.Tensor:
    """The same values as a view of a buffer whose rows are ``pad`` elements longer, the gap poisoned."""
    buffer = torch.full((*rows.shape[:-1], ROW + pad), poison, dtype=rows.dtype)
    buffer[..., :ROW] = rows
    return buffer[..., :ROW]


def build(
    prefixes: Sequence[int],
    nodes: int,
    heads: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    form: str = "mask",
    visible: torch.Tensor | None = None,
    poison: float = float("nan"),
    index_dtype: torch.dtype = torch.int64,
    indptr_dtype: torch.dtype = torch.int32,
    mask_dtype: torch.dtype = torch.bool,
    pad: int = 8,
    rank3: bool = False,
    seed: int = 0,
) -> Case:
    """Make one hostile call. ``form``: mask, bits, ubits (uint64) or chain; ``pad`` elements keep 16-byte alignment."""
    g = torch.Generator().manual_seed(seed)
    batch, total = len(prefixes), sum(prefixes)
    if form == "chain":
        visible = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(batch, -1, -1)
    elif visible is None:
        visible = torch.stack([random_tree(nodes, g) for _ in range(batch)]) if batch else torch.ones(0, nodes, nodes)
    q = torch.randn(batch * nodes, heads, ROW, generator=g).to(dtype)
    draft = torch.randn(batch * nodes, ROW, generator=g).to(dtype)
    spare = 40
    slots = torch.randperm(total + spare, generator=g)[:total] + 1  # slot 0, the dummy slot, is never named
    pool = torch.full((total + spare + 1, ROW), poison, dtype=dtype)
    pool[slots] = torch.randn(total, ROW, generator=g).to(dtype)
    indices = torch.cat([slots, torch.full((7,), 2**31 - 1)]).to(index_dtype)
    indptr = torch.tensor([0, *itertools.accumulate(prefixes)]).to(indptr_dtype)
    q, draft, pool = (padded_rows(t, pad, poison) for t in (q, draft, pool))
    if rank3:
        draft, pool = draft[:, None], pool[:, None]
    options: Options = {"nodes": nodes, "scale": SCALE}
    if form == "mask":
        mask, mask_indptr = flat_mask(visible, prefixes, mask_dtype, g)
        options |= {"mask": mask, "mask_indptr": mask_indptr}
    elif form in ("bits", "ubits"):
        bits = pack_bits(visible)
        options["tree_bits"] = bits if form == "bits" else bits.view(torch.uint64)
    return to_device(Case((q, draft, pool, indptr, indices), options, tuple(prefixes), visible), device)


def to_device(case: Case, device: torch.device) -> Case:
    """Move a case, keeping the strides of the padded views."""
    if device.type == "cpu":
        return case

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor.to(device)
        wide = tensor.as_strided((*tensor.shape[:-1], tensor.stride(-2)), tensor.stride(), tensor.storage_offset())
        return wide.to(device)[..., : tensor.shape[-1]]

    options = {k: move(v) if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}
    return replace(case, tensors=tuple(move(t) for t in case.tensors), options=options)


PREFIX_SIZES = (0, 1, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097)
NODE_SIZES = (1, 2, 31, 32, 33, 63, 64, 65, 128, 129)
HEAD_COUNTS = (1, 6, 8, 10, 12, 16, 21, 64, 128)

TABLE: dict[str, dict[str, object]] = {
    "F3-mask-of-exact-size": {"prefixes": (3, 0, 11, 64, 30), "nodes": 5},
    "F11-empty-beside-4096": {"prefixes": (0, 4096), "nodes": 9},
    "F22-33-nodes-bits": {"prefixes": (20, 70), "nodes": 33, "form": "bits"},
    "F22-65-nodes-bits": {"prefixes": (20, 70), "nodes": 65, "form": "ubits"},
    "F22-130-nodes-bits": {"prefixes": (5, 0), "nodes": 130, "form": "bits"},
    "F24-9-nodes-21-prefix": {"prefixes": (21,), "nodes": 9, "heads": 8},
    "F26-int32-uint8": {
        "prefixes": (7, 40), "nodes": 9, "index_dtype": torch.int32, "mask_dtype": torch.uint8,
    },
    "F26-int64-bool": {"prefixes": (7, 40), "nodes": 9, "indptr_dtype": torch.int64},
    "no-gaps-rank-3": {"prefixes": (7, 40), "nodes": 9, "pad": 0, "rank3": True},
    "rank-3-gaps": {"prefixes": (7, 40), "nodes": 9, "pad": 72, "rank3": True},
    "260-nodes": {"prefixes": (10,), "nodes": 260, "heads": 1, "form": "bits"},
    "all-empty": {"prefixes": (0, 0, 0), "nodes": 3, "form": "chain"},
    "chain": {"prefixes": (31, 200, 1), "nodes": 16, "form": "chain"},
    **{f"F18-{heads}-heads": {"prefixes": (33, 5), "nodes": 5, "heads": heads} for heads in HEAD_COUNTS},
    **{f"F27-{nodes}-nodes": {"prefixes": PREFIX_SIZES, "nodes": nodes, "heads": 1} for nodes in NODE_SIZES},
}  # fmt: skip
"""Named calls for ``build``; the F numbers are those of docs and issues (faults seen in the field)."""
