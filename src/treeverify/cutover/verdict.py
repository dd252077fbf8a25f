"""What a gate answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Kind = Literal["validate", "soak", "on"]
"""``validate``: short, synthetic load; ``soak``: live traffic under validate; ``on``: ours serves."""
Stage = Literal[Kind, "validate-eager", "on-eager", "validate-graphs"]
"""The kinds, and the stages of a cutover that are judged as one of them."""
Figure = float | int | str | None


class Parted(BaseModel):
    """One text that is not the same in two samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    place: int | None
    """Number of the first token that differs, from 0; None: the candidate has no such text."""
    gap: float | None
    """By how many nats the gap between the two tokens moved, at least; None: not known."""
    judged: Literal["near-tie", "fault", "prefill", "not judged"]


class Verdict(BaseModel):
    """One gate's answer. ``reason`` is one line for an operator: why it passed, or what is wrong and where.

    ``passed`` is None where the gate could not judge, which the operator has allowed: it then holds nothing up, and
    says nothing either.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Stage
    gate: str
    passed: bool | None
    figures: dict[str, Figure]
    threshold: str
    reason: str
    texts: tuple[Parted, ...] = ()
    """Every text that parts, of the gate ``generation``."""

    @property
    def outcome(self) -> str:
        """``passed``, ``FAILED`` or ``not judged``."""
        return "not judged" if self.passed is None else "passed" if self.passed else "FAILED"


def few(lines: list[str], most: int = 3) -> str:
    """The first few lines, and how many more there are."""
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
