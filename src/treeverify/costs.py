"""What a step costs: milliseconds on a grid of widths, batches and contexts, interpolated between; and their cache."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeverify.env import cache_dir
from treeverify.errors import ConfigError, ContractError
from treeverify.tree.budget import check_ladder

FORMAT = 1
"""Changes when a table of an older version of this module says something else."""


@dataclass(frozen=True, eq=False)
class CostTable:
    """Measured milliseconds of a step.

    ``widths``: the ladder, rising, the first is 1. ``batches``, ``contexts``: rising, >= 1; a context is the committed
    tokens of a request. ``verify``: float64 [widths, batches, contexts], all of a step but the draft. ``draft``:
    float64 [batches, contexts], until the widest tree is there. Values must be finite and > 0 (draft: >= 0). More
    nodes, requests or tokens never cost less: both are made monotone along every axis by running maxima, so noise in a
    measurement cannot make a wider tree look cheaper. Raises ConfigError for anything else.
    """

    widths: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: NDArray[np.float64]
    draft: NDArray[np.float64]

    def __post_init__(self) -> None:
        """Check, and make monotone."""
        try:
            check_ladder("CostTable", self.widths)
        except ContractError as error:
            raise ConfigError(f"costs: {error}") from None
        for name in ("batches", "contexts"):
            axis = np.asarray(getattr(self, name))
            if (
                axis.ndim != 1
                or axis.size == 0
                or axis.dtype.kind not in "iu"
                or axis[0] < 1
                or (np.diff(axis) < 1).any()
            ):
                raise ConfigError(f"costs: {name}: expected rising integers >= 1, got {getattr(self, name)!r}")
        plane = (len(self.batches), len(self.contexts))
        for name, shape, low in (("verify", (len(self.widths), *plane), 1e-9), ("draft", plane, 0.0)):
            grid = np.array(getattr(self, name), dtype=np.float64)
            if grid.shape != shape or not (np.isfinite(grid) & (grid >= low)).all():
                raise ConfigError(f"costs: {name}: expected positive numbers of shape {list(shape)}")
            for axis_index in range(grid.ndim):
                grid = np.maximum.accumulate(grid, axis=axis_index)
            grid.flags.writeable = False
            object.__setattr__(self, name, grid)

    def verify_ms(self, width: int, batch: int, context: int) -> float:
        """Milliseconds of all but the draft, for any width, batch and context >= 1.

        Linear between grid points. Outside the grid the nearest edge holds: what is compared are widths of one batch
        and context, which are all held alike.
        """
        return float(_between(self._ladder_ms(batch, context), self.widths, width))

    def draft_ms(self, batch: int, context: int) -> float:
        """Milliseconds of one draft and its tree; between and outside the grid as ``verify_ms``."""
        return float(_plane(self.draft, self.batches, self.contexts, batch, context))

    def plain_ms(self, batch: int, context: int) -> float:
        """Milliseconds of a step without a draft."""
        return self.verify_ms(1, batch, context)

    def step_ms(self, batch: int, context: int) -> NDArray[np.float64]:
        """Milliseconds of a step at each width of the ladder, float64 [widths], the draft included for all of them."""
        return self._ladder_ms(batch, context) + self.draft_ms(batch, context)

    def as_json(self) -> dict[str, Any]:
        """The table as JSON values, for ``of_json``."""
        axes = {name: list(getattr(self, name)) for name in ("widths", "batches", "contexts")}
        return {**axes, "verify": self.verify.tolist(), "draft": self.draft.tolist()}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> CostTable:
        """Inverse of ``as_json``; ConfigError for anything else."""
        try:
            widths, batches, contexts = (tuple(found[name]) for name in ("widths", "batches", "contexts"))
            verify, draft = (np.array(found[name], dtype=np.float64) for name in ("verify", "draft"))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"costs: not a table: {error!r}") from None
        return cls(widths, batches, contexts, verify, draft)

    def _ladder_ms(self, batch: int, context: int) -> NDArray[np.float64]:
        return _plane(self.verify, self.batches, self.contexts, batch, context)


@dataclass(frozen=True)
class CostCache:
    """Tables by machine and model: one file for each key, named after its hash, which says the whole key inside.

    A file that is missing, unreadable, cut short or of another key is measured anew. Files appear atomically.
    """

    key: Mapping[str, object]
    folder: Path = field(default_factory=lambda: cache_dir() / "costs")

    @property
    def path(self) -> Path:
        """The key's file."""
        text = json.dumps(self._key, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def load(self) -> CostTable | None:
        """The table, or None where it must be measured."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return CostTable.of_json(found["costs"]) if found["key"] == self._key else None
        except (OSError, ValueError, KeyError, TypeError):  # ConfigError is a ValueError
            return None

    def store(self, costs: CostTable) -> None:
        """Write the table; ConfigError that names the folder where that cannot be done."""
        text = json.dumps({"key": self._key, "costs": costs.as_json()}, indent=1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                written = Path(scratch) / self.path.name
                written.write_text(text + "\n", encoding="utf-8")
                os.replace(written, self.path)
        except OSError as error:
            raise ConfigError(
                f"{self.folder}: measured costs cannot be kept: {error.strerror}; TREEVERIFY_CACHE names another folder"
            ) from None

    @property
    def _key(self) -> dict[str, object]:
        return {"format": FORMAT, **self.key}


def _plane(
    grid: NDArray[np.float64], batches: Sequence[int], contexts: Sequence[int], batch: int, context: int
) -> NDArray[np.float64]:
    """Bilinear over the last two axes."""
    return _between(_between(grid, contexts, context), batches, batch)


def _between(grid: NDArray[np.float64], points: Sequence[int], at: int) -> NDArray[np.float64]:
    """Linear along the last axis, the edges held."""
    right = int(np.searchsorted(points, at))
    if right == 0 or right == len(points):
        return np.asarray(grid[..., min(right, len(points) - 1)])
    low, high = points[right - 1], points[right]
    share = (at - low) / (high - low)
    return np.asarray((1 - share) * grid[..., right - 1] + share * grid[..., right])
