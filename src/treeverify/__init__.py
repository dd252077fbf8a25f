"""Tree-verify attention for MLA models, and the DDTree speculation loop around it.

Importing this package touches no device and imports no torch; public names load on first use.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {"tree_attention": "treeverify.ops.tree_attention.api"}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
