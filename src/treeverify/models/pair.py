"""Load a target, its drafter and their tokenizer from one folder, or those that come with the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from treeverify.errors import WeightsError
from treeverify.models.drafter import Drafter
from treeverify.models.packaged import assets
from treeverify.models.target import Target
from treeverify.models.tokenizer import Tokenizer


class Pair(NamedTuple):
    """A target, the drafter made for it, and their tokenizer (None when the folder holds none)."""

    target: Target
    drafter: Drafter
    tokenizer: Tokenizer | None


def load_pair(
    path: Path | str | None = None, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Pair:
    """Load ``path/target``, ``path/drafter`` and ``path[/target]/tokenizer.json``; None: the packaged model.

    Raises ConfigError or WeightsError, one line each.
    """
    root = assets() if path is None else Path(path)
    for part in ("target", "drafter"):
        if not (root / part).is_dir():
            raise WeightsError(f"{root}: expected a folder with target/ and drafter/, {part}/ is missing")
    target = Target.load(root / "target", dtype=dtype, device=device)
    drafter = Drafter.load(root / "drafter", target)
    files = [file for file in (root / "tokenizer.json", root / "target" / "tokenizer.json") if file.exists()]
    tokenizer = Tokenizer.load(files[0], target.config.bos_token_id) if files else None
    return Pair(target, drafter, tokenizer)
