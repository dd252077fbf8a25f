"""A verify call in a file: one request of it, with what two kernels made of it; written by validate, read by replay.

A safetensors file. Tensors, where ``dtype`` is bfloat16 (float32 from a CPU) and the draft rows are those of the tree:

- ``q [nodes, heads, 576]``, ``k [nodes, 1, 576]`` (draft rows), ``kbuf [prefix, 1, 576]`` (the prefix rows, in order);
- ``mask [nodes, nodes]`` or ``[nodes, prefix + nodes]`` bool or uint8, of which the last ``nodes`` columns are read;
- ``o [nodes, heads, 512]``: the baseline's output, which was served; optionally ``ours``, of the same shape;
- ``idx``, ``v``, ``ref``: allowed, not read.

Metadata: ``sm_scale``, the factor on the scores; anything else is a note that the report repeats. **User data:** the
rows are activations of a user's prompt and text, from which parts of it may be recovered.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as encode

from treeverify.errors import ParityError
from treeverify.ops.tree_attention.contract import LATENT, ROW

_REQUIRED = ("q", "k", "kbuf", "mask", "o")
_OPTIONAL = ("ours", "idx", "v", "ref")
_SCALE = "sm_scale"


@dataclass(frozen=True)
class RecordedCall:
    """One request of a verify call; shapes as in the module's description."""

    q: torch.Tensor
    k: torch.Tensor
    kbuf: torch.Tensor
    visible: torch.Tensor
    """``[nodes, nodes]`` bool: may the node of this row see the draft row of this column?"""
    scale: float
    baseline: torch.Tensor
    ours: torch.Tensor | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """Draft nodes, root included."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Heads of the rank that recorded it."""
        return self.q.shape[1]

    @property
    def prefix(self) -> int:
        """Prefix rows."""
        return self.kbuf.shape[0]


def load(path: Path) -> RecordedCall:
    """Read a call. Raises ``ParityError`` naming file, tensor, expected and found for anything that is not one."""
    tensors, notes = _read(path)
    missing = [name for name in _REQUIRED if name not in tensors]
    unknown = [name for name in tensors if name not in _REQUIRED + _OPTIONAL]
    if missing or unknown:
        raise _bad(path, "tensors", f"{', '.join(_REQUIRED)}, perhaps {', '.join(_OPTIONAL)}", ", ".join(tensors))
    scale = _scale(path, notes.pop(_SCALE, None))
    _check(path, tensors)
    nodes = tensors["q"].shape[0]
    return RecordedCall(
        q=tensors["q"],
        k=tensors["k"],
        kbuf=tensors["kbuf"],
        visible=tensors["mask"][:, -nodes:] != 0,
        scale=scale,
        baseline=tensors["o"],
        ours=tensors.get("ours"),
        notes=notes,
    )


def save(call: RecordedCall, path: Path) -> None:
    """Write ``call`` to ``path``, readable by this user only, complete or not at all, and never over another file.

    Raises ``FileExistsError`` if ``path`` exists, ``OSError`` if it cannot be written.
    """
    tensors = {"q": call.q, "k": call.k, "kbuf": call.kbuf, "mask": call.visible, "o": call.baseline}
    if call.ours is not None:
        tensors["ours"] = call.ours
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = encode(plain, {**call.notes, _SCALE: repr(call.scale)})
    handle, temporary = tempfile.mkstemp(prefix=".treeverify-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, fails where the name is taken
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ParityError(f"{path}: not a readable safetensors file: {error}") from error


def _scale(path: Path, text: str | None) -> float:
    try:
        scale = float(text or "")
    except ValueError:
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise _bad(path, f"metadata {_SCALE}", "a finite number > 0", repr(text))
    return scale


def _check(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    q = tensors["q"]
    if q.dtype not in (torch.bfloat16, torch.float32):
        raise _bad(path, "q: dtype", "torch.bfloat16 or torch.float32", q.dtype)
    if q.ndim != 3 or q.shape[2] != ROW or 0 in q.shape:
        raise _bad(path, "q: shape", f"[nodes, heads, {ROW}]", list(q.shape))
    nodes, heads, _ = q.shape
    prefix = tensors["kbuf"].shape[0] if tensors["kbuf"].ndim else 0
    shapes = {
        "k": [nodes, 1, ROW],
        "kbuf": [prefix, 1, ROW],
        "o": [nodes, heads, LATENT],
        "ours": [nodes, heads, LATENT],
    }
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if list(tensor.shape) != shape:
            raise _bad(path, f"{name}: shape", shape, list(tensor.shape))
        if tensor.dtype != q.dtype:
            raise _bad(path, f"{name}: dtype", f"{q.dtype} (that of q)", tensor.dtype)
    mask = tensors["mask"]
    if mask.dtype not in (torch.bool, torch.uint8):
        raise _bad(path, "mask: dtype", "torch.bool or torch.uint8", mask.dtype)
    if list(mask.shape) not in ([nodes, nodes], [nodes, prefix + nodes]):
        raise _bad(path, "mask: shape", f"[{nodes}, {nodes}] or [{nodes}, {prefix + nodes}]", list(mask.shape))


def _bad(path: Path, what: str, expected: object, found: object) -> ParityError:
    return ParityError(f"{path}: {what}: expected {expected}, found {found}")
