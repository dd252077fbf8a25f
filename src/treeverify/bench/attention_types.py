"""What a run of the attention benchmark is told, what it keeps of each implementation, and how it can break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from treeverify.bench import rivals
from treeverify.bench.timing import Replay
from treeverify.bench.workloads import Indices, Point
from treeverify.errors import TreeverifyError

WRONG = 1.0e-2
"""Relative error from which a result counts as wrong; bf16 kernels show 1.7e-3 to 2.8e-3."""


class DeviceLostError(TreeverifyError):
    """An implementation broke the CUDA context, so that nothing else can run in this process."""

    def __init__(self, implementation: str, point: Point, reason: str) -> None:
        """Remember who did it, and where."""
        super().__init__(f"{implementation} broke the CUDA context at {point}: {reason}")
        self.implementation = implementation
        self.point = point


@dataclass
class Options:
    """What to run and how."""

    output: Path
    implementations: Sequence[str] = rivals.NAMES
    seconds: float = 200.0
    """No new point begins this long after everything is loaded; the points left out leave records that say so."""
    rounds: int = 5
    seed: int = 0
    commit: str | None = None
    device: str = "cuda"
    max_sets: int | None = None
    """Upper limit of KV sets per point; None: as many as the cache asks for."""
    say: Callable[[str], None] = print


@dataclass
class Entry:
    """One implementation in one index layout at one point: its replay or the reason why there is none."""

    implementation: str
    indices: Indices
    tree: bool
    replay: Replay | None = None
    error: float | None = None
    reason: str | None = None

    @property
    def key(self) -> str:
        """Name in the rounds."""
        return f"{self.implementation} {self.indices}"
