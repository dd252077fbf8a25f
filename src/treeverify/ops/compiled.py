"""Loads the library of the tree operators for a device and hands out its functions.

Compiling and loading cannot be captured in a CUDA graph: call ``prepare``, or each operator once, before a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from treeverify.errors import BuildError
from treeverify.jit import compiler
from treeverify.jit.modules import module_named, target_for

MODULE = "tree_ops"


def prepare(device: torch.device) -> None:
    """Compile, if need be, and load the tree operators for a CUDA ``device``. Raises ``BuildError``."""
    _library(_index(device))


def function(name: str, device: torch.device) -> Callable[..., object]:
    """Return the library's function ``name`` for a CUDA ``device``. Raises ``BuildError``."""
    return _function(_index(device), name)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _function(index: int, name: str) -> Callable[..., object]:
    return _library(index).function(name)


@cache
def _library(index: int) -> compiler.Library:
    module, target = module_named(MODULE), target_for(torch.cuda.get_device_capability(index))
    if not compiler.loaded(module, target) and torch.cuda.is_current_stream_capturing():
        raise BuildError(f"{MODULE} is not loaded, and loading cannot be captured: call prepare() before the capture")
    return compiler.load(module, target)
