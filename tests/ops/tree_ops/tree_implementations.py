"""What the checks run: the public API on a device, or the references. ``emulated.Emulated`` has the same methods."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

import treeverify

NAMES = (
    "draft_topk", "draft_topk_combine", "draft_topk_shard", "draft_window", "feature_gather", "kv_compact",
    "tree_accept", "tree_accept_sampled", "tree_build", "tree_mask",
)  # fmt: skip


class Api:
    """The public operators on ``device``: the pure core on a CPU, the kernels on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.name = device
        for name in NAMES:
            setattr(self, name, getattr(treeverify, name))


class References(Api):
    """The operators' definitions, which share nothing with the pure core; on a CPU."""

    def __init__(self) -> None:
        super().__init__("cpu")
        for name in NAMES:
            folder = name.removesuffix("_shard").removesuffix("_combine").removesuffix("_sampled")
            module = import_module(f"treeverify.ops.{folder}.reference")
            setattr(self, name, partial(_into, getattr(module, f"{name}_reference")))


def _into(reference: Any, *given: Any, out: Any = None, workspace: Any = None, **sizes: Any) -> Any:
    """Call a reference, which returns new outputs, as its operator is called."""
    del workspace
    if reference.__name__ == "tree_mask_reference":
        return reference(*given, treeverify.tree_mask(*given) if out is None else out)
    made = reference(*given, **sizes)
    if out is None:
        return made
    if isinstance(out, torch.Tensor):
        return out.copy_(made)
    for name, tensor in vars(out).items():
        rows = len(getattr(made, name))
        tensor[:rows] = getattr(made, name)
        tensor[rows:] = 0
    return out
