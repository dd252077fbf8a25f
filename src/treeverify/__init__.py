"""Tree-verify attention for MLA models, and the DDTree speculation loop around it.

Importing this package touches no device and imports no torch; public names load on first use.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "draft_topk": "treeverify.ops.draft_topk.api",
    "draft_topk_combine": "treeverify.ops.draft_topk.api",
    "draft_topk_shard": "treeverify.ops.draft_topk.api",
    "draft_window": "treeverify.ops.draft_window.api",
    "feature_gather": "treeverify.ops.feature_gather.api",
    "kv_compact": "treeverify.ops.kv_compact.api",
    "tree_accept": "treeverify.ops.tree_accept.api",
    "tree_accept_sampled": "treeverify.ops.tree_accept.api",
    "tree_attention": "treeverify.ops.tree_attention.api",
    "tree_build": "treeverify.ops.tree_build.api",
    "tree_mask": "treeverify.ops.tree_mask.api",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
