"""Calls that break the contract, one per rule: what to change in a good call, and what the error must say.

``CALLS`` need nothing but shapes, dtypes, strides; ``VALUE_CALLS`` need values, which are only read in host memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Case

Change = Callable[[Case], dict[str, object]]
TENSORS = ("q", "draft_kv", "kv_pool", "kv_indptr", "kv_indices")


def arguments(case: Case, change: Change) -> dict[str, object]:
    """The keyword arguments of the good call with the change applied; a value of ``...`` removes the argument."""
    changed = {**dict(zip(TENSORS, case.tensors, strict=True)), **case.options, **change(case)}
    return {name: value for name, value in changed.items() if value is not ...}


def t(case: Case, name: str) -> torch.Tensor:
    return dict(zip(TENSORS, case.tensors, strict=True))[name]


def fp8(case: Case, name: str) -> torch.Tensor:
    return t(case, name).new_zeros(t(case, name).shape, dtype=torch.float8_e4m3fn)


def widened(case: Case, name: str) -> torch.Tensor:
    """The last dimension with stride 2."""
    return t(case, name).repeat_interleave(2, dim=-1)[..., ::2]


CALLS: dict[str, tuple[Change, str]] = {
    "q not a tensor": (lambda c: {"q": None}, "q: expected a torch.Tensor, got NoneType"),
    "q rank": (lambda c: {"q": t(c, "q")[0]}, "q: rank: expected 3"),
    "q row": (lambda c: {"q": t(c, "q")[..., :512]}, r"q: dimension 2 \(row\): expected 576, got 512"),
    "q tokens": (lambda c: {"q": t(c, "q")[:-1]}, "q: dimension 0 .*: expected a multiple of nodes = 5, got 9"),
    "q heads": (lambda c: {"q": t(c, "q")[:, :0]}, r"q: dimension 1 \(heads\)"),
    "q float16": (lambda c: {"q": t(c, "q").half()}, "q: dtype: expected .*bfloat16.*, got torch.float16"),
    "q float64": (lambda c: {"q": t(c, "q").double()}, "q: dtype: .*got torch.float64"),
    "q last stride": (lambda c: {"q": widened(c, "q")}, "q: stride of the last dimension: expected 1, got 2"),
    "q overlapping": (lambda c: {"q": t(c, "q")[:1].expand(10, -1, -1)}, "q: stride of dimension 0: expected >= 576"),
    "q device": (lambda c: {"q": t(c, "q").to("meta")}, "device"),
    "draft rank": (lambda c: {"draft_kv": t(c, "draft_kv").flatten()}, "draft_kv: rank: expected 2 or 3"),
    "draft rows": (lambda c: {"draft_kv": t(c, "draft_kv")[:-1]}, "draft_kv: dimension 0 .*: expected 10, got 9"),
    "draft KV heads": (
        lambda c: {"draft_kv": t(c, "draft_kv")[:, None].expand(-1, 2, -1)},
        r"draft_kv: dimension 1 \(KV heads\): expected 1, got 2",
    ),
    "draft row": (lambda c: {"draft_kv": t(c, "draft_kv")[:, :512]}, "draft_kv: dimension 1 .*: expected 576, got 512"),
    "draft dtype": (lambda c: {"draft_kv": t(c, "draft_kv").half()}, "draft_kv: dtype: .*got torch.float16"),
    "draft fp8": (lambda c: {"draft_kv": fp8(c, "draft_kv")}, "draft_kv: dtype: .*fp8 KV is not supported yet"),
    "draft device": (lambda c: {"draft_kv": t(c, "draft_kv").to("meta")}, "draft_kv: device: .*got meta"),
    "pool rank": (lambda c: {"kv_pool": t(c, "kv_pool")[None, None]}, "kv_pool: rank: expected 2 or 3"),
    "pool row": (lambda c: {"kv_pool": t(c, "kv_pool")[:, :575]}, "kv_pool: dimension 1 .*: expected 576, got 575"),
    "pool fp8": (lambda c: {"kv_pool": fp8(c, "kv_pool")}, "kv_pool: dtype: .*fp8 KV is not supported yet"),
    "pool stride": (lambda c: {"kv_pool": widened(c, "kv_pool")}, "kv_pool: stride of the last dimension"),
    "pool overlapping": (
        lambda c: {"kv_pool": t(c, "kv_pool").as_strided((9, 576), (64, 1))},
        "kv_pool: stride of dimension 0: expected >= 576 elements.*, got 64",
    ),
    "indptr float": (lambda c: {"kv_indptr": t(c, "kv_indptr").float()}, "kv_indptr: dtype: .*got torch.float32"),
    "indptr int16": (lambda c: {"kv_indptr": t(c, "kv_indptr").short()}, "kv_indptr: dtype: .*got torch.int16"),
    "indptr length": (lambda c: {"kv_indptr": t(c, "kv_indptr")[:-1]}, "kv_indptr: dimension 0: expected 3, got 2"),
    "indptr rank": (lambda c: {"kv_indptr": t(c, "kv_indptr")[None]}, "kv_indptr: rank: expected 1"),
    "indptr a list": (lambda c: {"kv_indptr": [0, 1, 2]}, "kv_indptr: expected a torch.Tensor, got list"),
    "indices uint8": (lambda c: {"kv_indices": t(c, "kv_indices").byte()}, "kv_indices: dtype: .*got torch.uint8"),
    "indices stride": (
        lambda c: {"kv_indices": t(c, "kv_indices").repeat_interleave(2)[::2]},
        "kv_indices: stride of dimension 0: expected 1, got 2",
    ),
    "indices device": (lambda c: {"kv_indices": t(c, "kv_indices").to("meta")}, "kv_indices: device"),
    "nodes missing": (lambda c: {"nodes": ...}, "nodes: expected a value"),
    "nodes zero": (lambda c: {"nodes": 0}, "nodes: expected an int"),
    "nodes bool": (lambda c: {"nodes": True}, "nodes: expected an int"),
    "nodes float": (lambda c: {"nodes": 5.0}, "nodes: expected an int"),
    "scale missing": (lambda c: {"scale": ...}, "scale: expected a value"),
    "scale None": (lambda c: {"scale": None}, "scale: expected a finite float > 0"),
    "scale NaN": (lambda c: {"scale": float("nan")}, "scale: expected a finite float > 0.*got nan"),
    "scale zero": (lambda c: {"scale": 0.0}, "scale: expected a finite float > 0"),
    "scale a tensor": (lambda c: {"scale": torch.tensor(1.0)}, "scale: expected a finite float > 0"),
    "mask and bits": (
        lambda c: {"tree_bits": t(c, "q").new_zeros(2, 5, 1, dtype=torch.int64)},
        "mask, tree_bits: expected at most one of them",
    ),
    "mask alone": (lambda c: {"mask_indptr": None}, "mask_indptr: expected mask and mask_indptr together"),
    "mask_indptr alone": (lambda c: {"mask": None}, "mask: expected mask and mask_indptr together"),
    "mask float": (lambda c: {"mask": c.options["mask"].float()}, "mask: dtype: .*bool.*got torch.float32"),
    "mask int64": (lambda c: {"mask": c.options["mask"].long()}, "mask: dtype: .*got torch.int64"),
    "mask rank": (lambda c: {"mask": c.options["mask"][None]}, "mask: rank: expected 1"),
    "mask tiny": (lambda c: {"mask": c.options["mask"][:49]}, "mask: dimension 0: expected >= 50"),
    "mask_indptr dtype": (lambda c: {"mask_indptr": c.options["mask_indptr"].double()}, "mask_indptr: dtype"),
    "mask_indptr length": (lambda c: {"mask_indptr": c.options["mask_indptr"][:2]}, "mask_indptr: dimension 0"),
    "bits dtype": (
        lambda c: {"mask": None, "mask_indptr": None, "tree_bits": t(c, "kv_indptr").new_zeros(2, 5, 1).int()},
        "tree_bits: dtype: .*int64.*got torch.int32",
    ),
    "bits words": (
        lambda c: {"mask": None, "mask_indptr": None, "tree_bits": t(c, "q").new_zeros(2, 5, 2, dtype=torch.int64)},
        r"tree_bits: shape: expected \[2, 5, 1\], got \[2, 5, 2\]",
    ),
    "out dtype": (lambda c: {"out": t(c, "q").new_empty(10, 2, 512, dtype=torch.float64)}, "out: dtype"),
    "out shape": (lambda c: {"out": t(c, "q").new_empty(10, 2, 576)}, r"out: shape: expected \[10, 2, 512\]"),
    "out overlapping": (lambda c: {"out": t(c, "q").new_empty(10, 1, 512).expand(-1, 2, -1)}, "out: stride"),
    "lse dtype": (lambda c: {"lse": t(c, "q").new_empty(10, 2, dtype=torch.float64)}, "lse: dtype: .*float32"),
    "lse shape": (lambda c: {"lse": t(c, "q").new_empty(2, 10, dtype=torch.float32)}, "lse: shape"),
    "lse strides": (lambda c: {"lse": t(c, "q").new_empty(2, 10, dtype=torch.float32).T}, "lse: strides"),
    "workspace dtype": (lambda c: {"workspace": t(c, "q").new_empty(8)}, "workspace: dtype: .*uint8"),
    "fixed_split zero": (lambda c: {"fixed_split": 0}, "fixed_split: expected an int >= 1, got 0"),
    "fixed_split bool": (lambda c: {"fixed_split": True}, "fixed_split: expected an int >= 1"),
    "max_prefix negative": (lambda c: {"max_prefix": -1}, "max_prefix: expected an int >= 0, got -1"),
    "F28 logit cap": (lambda c: {"logit_cap": 30.0}, r"logit_cap: expected no value .*not supported.*got 30.0"),
    "F28 sliding window": (lambda c: {"sliding_window": 4096}, "sliding_window: .*not supported"),
    "F28 sinks": (lambda c: {"sinks": torch.zeros(2)}, "sinks: .*not supported.*got a tensor"),
    "F28 temperature": (lambda c: {"xai_temperature_len": 1024}, "xai_temperature_len: .*not supported"),
    "F28 k_scale": (lambda c: {"k_scale": 0.37}, "k_scale: .*not supported.*got 0.37"),
    "unknown option": (lambda c: {"softcap": 1.0}, "softcap: expected one of the options nodes, scale"),
}  # fmt: skip

VALUE_CALLS: dict[str, tuple[Change, str]] = {
    "indptr start": (lambda c: {"kv_indptr": t(c, "kv_indptr") + 1}, "kv_indptr: element 0: expected 0, got 1"),
    "indptr falls": (lambda c: {"kv_indptr": torch.tensor([0, 9, 7])}, "kv_indptr: element 2: expected >= 9, got 7"),
    "indices short": (lambda c: {"kv_indices": t(c, "kv_indices")[:3]}, "kv_indices: dimension 0: expected >= 7"),
    "max_prefix short": (lambda c: {"max_prefix": 3}, r"max_prefix: expected >= 4 \(the longest prefix\), got 3"),
    "slot beyond": (lambda c: {"kv_indices": torch.full((7,), 48)}, r"kv_indices: slot: expected 0\.\.47.*, got 48"),
    "slot negative": (lambda c: {"kv_indices": torch.full((7,), -1)}, "kv_indices: slot: .*got -1"),
    "empty pool": (lambda c: {"kv_pool": t(c, "kv_pool")[:0]}, "kv_indices: slot"),
    "mask short by one": (lambda c: {"mask": c.options["mask"][:-1]}, "mask: dimension 0: expected >= 85, got 84"),
    "mask stride P": (
        lambda c: {"mask_indptr": torch.tensor([0, 15, 35])},
        r"mask_indptr: request 0: expected >= 40 cells .*, got 0\.\.15",
    ),
    "mask offset negative": (lambda c: {"mask_indptr": c.options["mask_indptr"] - 1}, "mask_indptr: request 0"),
}


def good_case(**more: object) -> Case:
    """The call that every bad one is made from: prefixes 3 and 4, 5 nodes, 2 heads, 48 slots."""
    from cases import build

    return build((3, 4), 5, 2, **more)
