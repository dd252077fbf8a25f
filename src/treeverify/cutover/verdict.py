"""What a gate answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Stage = Literal["validate", "soak", "on"]
"""``validate``: short, synthetic load; ``soak``: live traffic under validate; ``on``: ours serves."""
Figure = float | int | str | None


class Verdict(BaseModel):
    """One gate's answer. ``reason`` is one line for an operator: why it passed, or what is wrong and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Stage
    gate: str
    passed: bool
    figures: dict[str, Figure]
    threshold: str
    reason: str


def few(lines: list[str], most: int = 3) -> str:
    """The first few lines, and how many more there are."""
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
