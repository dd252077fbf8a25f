"""The held-out text that comes with the checkout: prompts from files that no training saw."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from treeverify.errors import WeightsError
from treeverify.models.packaged import assets


@dataclass(frozen=True)
class Heldout:
    """One window of a held-out file: ``prompt_ids`` and the true text's ``continuation_ids`` after them."""

    file: str
    prompt_ids: list[int]
    continuation_ids: list[int]


def load_heldout(path: Path | None = None) -> list[Heldout]:
    """Read ``heldout.json`` (default: the packaged one); WeightsError when it cannot be used."""
    file = path or assets() / "heldout.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        cut = found["prompt_tokens"]
        return [Heldout(p["file"], p["tokens"][:cut], p["tokens"][cut:]) for p in found["prompts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{file}: held-out prompts cannot be read: {error}") from None
