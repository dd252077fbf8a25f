"""Checkpoint files: safetensors, one file or shards with an index; every defect is one line, a WeightsError."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from treeverify.errors import WeightsError

Shape = tuple[int, ...]


def load(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint at ``path`` (a folder or a ``.safetensors`` file), on the CPU.

    A folder holds ``model.safetensors``, or ``model.safetensors.index.json`` with its shards. WeightsError when a file
    is missing, truncated or unreadable.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(path):
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise WeightsError(f"{file}: missing, truncated or unreadable: {reason}") from None
    return tensors


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise WeightsError(f"{path}: holds neither model.safetensors nor model.safetensors.index.json")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{index}: not a safetensors index: {type(error).__name__}: {error}") from None
    return [path / shard for shard in shards]


def check(tensors: dict[str, torch.Tensor], expected: dict[str, Shape], source: object) -> None:
    """WeightsError unless every name in ``expected`` is there, floating point, with its shape; extra names are fine."""
    problems = [f"{name}: missing" for name in expected if name not in tensors]
    for name, shape in expected.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            problems.append(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            problems.append(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise WeightsError(f"{source}: {'; '.join(problems[:3])}{more}")
