"""What the checks run: the public API on a device. ``emulated.Emulated`` has the same methods."""

from __future__ import annotations

import torch

import treeverify


class Api:
    """The public operators on ``device``: the torch references on a CPU, the kernels on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.name = "reference" if device == "cpu" else device
        for name in (
            "draft_topk", "draft_topk_combine", "draft_topk_shard", "draft_window", "feature_gather", "kv_compact",
            "tree_accept", "tree_accept_sampled", "tree_build", "tree_mask",
        ):  # fmt: skip
            setattr(self, name, getattr(treeverify, name))
