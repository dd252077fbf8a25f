"""Checkpoint files: safetensors, one file or shards with an index; every defect is one line, a WeightsError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from treeverify.errors import WeightsError
from treeverify.models.files import json_object

Shape = tuple[int, ...]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint at ``path`` (a folder or a ``.safetensors`` file), on the CPU.

    A folder holds ``model.safetensors``, or ``model.safetensors.index.json`` with its shards. WeightsError when a file
    is missing, truncated or unreadable, or when two shards hold a tensor of one name.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(path):
        try:
            found = load_file(file)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise WeightsError(f"{file}: missing, truncated or unreadable: {reason}") from None
        if twice := sorted(tensors.keys() & found.keys()):
            raise WeightsError(f"{file}: {twice[0]}: another shard holds it too")
        tensors.update(found)
    return tensors


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise WeightsError(f"{path}: holds neither model.safetensors nor model.safetensors.index.json")
    shards = json_object(index, WeightsError).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise WeightsError(f"{index}: not a safetensors index: weight_map: expected an object of tensors and files")
    for tensor, shard in shards.items():
        if not isinstance(shard, str) or shard in ("", "..") or Path(shard).name != shard:
            raise WeightsError(f"{index}: not a safetensors index: {tensor}: expected a file's name, got {shard!r}")
    return [path / shard for shard in sorted(set(shards.values()))]


def check(
    tensors: Mapping[str, torch.Tensor], expected: dict[str, Shape], unused: Iterable[str], source: object
) -> None:
    """WeightsError unless every name in ``expected`` is there with its shape, as one of ``DTYPES``.

    ``unused`` names tensors that are there and that a forward would need: a model with them computes something else.
    """
    problems = [f"{name}: missing" for name in expected if name not in tensors]
    for name, shape in expected.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            problems.append(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
        elif tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            problems.append(f"{name}: expected one of {known}, got {tensor.dtype}")
    problems += [f"{ascii(name)[1:-1]}: the model of this config.json has no such tensor" for name in unused]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise WeightsError(f"{source}: {'; '.join(problems[:3])}{more}")
