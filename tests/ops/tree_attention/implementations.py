"""The implementations that run on any machine, by name, as functions of a case."""

from __future__ import annotations

from collections.abc import Callable

import torch

from treeverify import tree_attention
from treeverify.ops.tree_attention.reference import tree_attention_reference
from treeverify.ops.tree_attention.split_kv import tree_attention_split_kv


def reference(*tensors, **options):
    return tree_attention_reference(*tensors, dtype=torch.float32, **options)


def api_reference(*tensors, **options):
    return tree_attention(*tensors, implementation="reference", **options)


IMPLEMENTATIONS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "reference": reference,
    "split_kv": tree_attention_split_kv,
    "api-reference": api_reference,
    "api": tree_attention,
}
