"""The contract of ``tree_mask``: what attention and SGLang want to know of a tree, from its parents.

A node sees its ancestors and itself (``tree.visibility``). A node other than 0 whose parent is not a smaller node is
padding (``tree_build``): it sees itself alone, stands at the root's position, and no link leads to it. Garbage in
``parents``, as in the padded requests of a captured graph, is therefore harmless.

Layouts of SGLang 0.5.17 to 0.5.23 (``TreeMaskMode``, ``kernels/ops/speculative/spec_tree.py``):

- ``full_mask``: FULL_MASK: request i has ``width`` rows of ``P_i + width`` cells, packed one after the other by true
  lengths. Only the last ``width`` cells of each row are written: the prefix is visible anyway, and neither SGLang's
  Triton kernels nor ``tree_attention`` read those cells. Who does must fill them with ones first.
- ``qlen_mask``: QLEN_ONLY: ``width`` rows of ``width`` cells per request.
- ``retrieve``: ``retrieve_index`` (i * width + node), ``retrieve_next_token`` (first child, -1 for none) and
  ``retrieve_next_sibling`` (next child of the same parent, -1 for none). Children are linked in rising order, so that
  ``verify_tree_greedy`` prefers the same of two siblings with one token as ``tree.accept``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from treeverify.ops.checks import INDEX_DTYPES, Checker

OPERATOR = "tree_mask"
MAX_WIDTH = 257
MASK_DTYPES = (torch.bool, torch.uint8)


@dataclass(frozen=True, eq=False)
class TreeMasks:
    """Outputs of one call; what is None is not computed."""

    bits: torch.Tensor | None = None
    """``[batch, width, ceil(width/64)]`` int64: bit j of word i is column 64*i + j (``tree.packing``)."""
    positions: torch.Tensor | None = None
    """``[batch*width]`` int64: prefix length + depth."""
    full_mask: torch.Tensor | None = None
    """Flat bool or uint8, at least ``sum(width * (P_i + width))`` cells."""
    qlen_mask: torch.Tensor | None = None
    """Flat bool or uint8, at least ``batch*width*width`` cells."""
    retrieve: torch.Tensor | None = None
    """``[3, batch, width]`` int64: retrieve_index, retrieve_next_token, retrieve_next_sibling."""

    @classmethod
    def empty(cls, batch: int, width: int, device: torch.device | str) -> TreeMasks:
        """Unwritten ``bits`` and ``positions``: what ``tree_attention`` and the model's forward need."""
        words = -(-width // 64)
        return cls(
            bits=torch.empty(batch, width, words, dtype=torch.int64, device=device),
            positions=torch.empty(batch * width, dtype=torch.int64, device=device),
        )

    @property
    def wanted(self) -> dict[str, torch.Tensor]:
        """The outputs that are there, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


def check(parents: torch.Tensor, prefix_lengths: torch.Tensor, out: TreeMasks) -> Checker:
    """Check one call (see ``api.tree_mask``); raises ``ContractError``. Reads values on a CPU only."""
    checker = Checker.of(OPERATOR, "parents", parents)
    checker.tensor("parents", parents, (torch.int32,), (None, None))
    batch, width = parents.shape
    checker.integer("parents: dimension 1 (width)", width, 1, MAX_WIDTH)
    checker.tensor("prefix_lengths", prefix_lengths, INDEX_DTYPES, (batch,))
    if out.bits is not None:
        checker.tensor("out.bits", out.bits, (torch.int64, torch.uint64), (batch, width, -(-width // 64)))
    if out.positions is not None:
        checker.tensor("out.positions", out.positions, (torch.int64,), (batch * width,))
    if out.retrieve is not None:
        checker.tensor("out.retrieve", out.retrieve, (torch.int64,), (3, batch, width))
    cells = batch * width * width
    prefixes = 0 if checker.on_gpu else int(prefix_lengths.sum())  # on a GPU the host does not know them
    for name, mask, least in (
        ("out.qlen_mask", out.qlen_mask, cells),
        ("out.full_mask", out.full_mask, cells + width * prefixes),
    ):
        if mask is not None:
            checker.tensor(name, mask, MASK_DTYPES, (None,))
            if mask.shape[0] < least:
                raise checker.refuse(f"{name}: dimension 0", f">= {least}", mask.shape[0])
    return checker
