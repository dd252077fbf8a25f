"""What the model benchmarks put into a record's ``case``: which weights ran, in what, and on how many threads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from treeverify.bench import record
from treeverify.errors import ConfigError
from treeverify.models.heldout import Heldout
from treeverify.models.packaged import assets
from treeverify.models.target import Target

_PARTS = ("target/model.safetensors", "drafter/model.safetensors")


def model_case(target: Target, root: Path | None) -> dict[str, object]:
    """Device type, dtype, CPU threads, and the digest of the weights in ``root`` (None: the packaged ones)."""
    return {
        "device": target.device.type,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "weights": weights_digest(root),
    }


def weights_digest(root: Path | None) -> str:
    """First 12 hex digits of the SHA-256 of the target's and the drafter's weights; sharded ones: ``unknown``."""
    files = [(assets() if root is None else root) / part for part in _PARTS]
    if not all(file.is_file() for file in files):
        return "unknown"
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.read_bytes())
    return whole.hexdigest()[:12]


def first(texts: Sequence[Heldout], count: int | None) -> list[Heldout]:
    """The first ``count`` texts (None: all); ConfigError if there are fewer."""
    if count is not None and not 1 <= count <= len(texts):
        raise ConfigError(f"prompts: expected 1..{len(texts)} (the held-out prompts there are), got {count}")
    return list(texts[:count])


def make_record(
    benchmark: str, case: dict[str, object], measures: dict[str, object], commit: str | None = None
) -> record.Record:
    """A checked record of this package's own implementation."""
    entry = {"benchmark": benchmark, "impl": "treeverify", "case": case, "measures": measures}
    entry |= record.environment(commit=commit)
    record.check(entry)
    return entry
