"""Load a target, its drafter and their tokenizer from one folder, or those that come with the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from treeverify.errors import WeightsError
from treeverify.models.config import TargetConfig
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

    ``tokenizer_config.json`` is obeyed where there is one, and its end-of-text token is one of the target's.
    Raises ConfigError or WeightsError, one line each.
    """
    root = assets() if path is None else Path(path)
    for part in ("target", "drafter"):
        if not (root / part).is_dir():
            raise WeightsError(f"{root}: expected a folder with target/ and drafter/, {part}/ is missing")
    config = TargetConfig.load(root / "target")
    tokenizer = _tokenizer(root, config.bos_token_id)
    if tokenizer is not None and tokenizer.eos is not None:
        config = config.with_eos((tokenizer.eos,), f"{root}: tokenizer_config.json")
    target = Target.load(root / "target", config, dtype=dtype, device=device)
    return Pair(target, Drafter.load(root / "drafter", target), tokenizer)


def _tokenizer(root: Path, bos: int | None) -> Tokenizer | None:
    """The tokenizer in ``root`` or ``root/target``, with its settings from either; None if there is none."""
    file, settings = (
        next((folder / name for folder in (root, root / "target") if (folder / name).exists()), None)
        for name in ("tokenizer.json", "tokenizer_config.json")
    )
    return None if file is None else Tokenizer.load(file, bos, settings)
