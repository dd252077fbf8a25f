"""``--budget N`` or ``--budget auto``: the option, and the policy that ``auto`` needs, measured once with progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import treeverify
from treeverify.bench import record, setting, step_costs
from treeverify.costs import CostCache, CostTable
from treeverify.engine.budget import AutoBudget
from treeverify.engine.request import AUTO, Budget
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError
from treeverify.models.drafter import Drafter
from treeverify.models.target import Target

Progress = Callable[[int], AbstractContextManager[Callable[[str], None]]]
"""progress(total): a bar on standard error; what it yields advances it by one."""


def parse_budget(text: str | None) -> Budget:
    """``auto``, an integer, or None; ConfigError for anything else."""
    if text is None or text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"budget: expected an integer or auto, got {text!r}") from None


def measured_policy(
    target: Target, drafter: Drafter, model: Path | None, verify: VerifyMode, progress: Progress
) -> AutoBudget:
    """The policy for one request at a time: costs from the cache of this machine and model, or measured now.

    A model whose weights are in several files has no digest here, so its costs are measured at each start.
    """
    grid = step_costs.Grid()
    machine = record.environment(commit="-")
    key = {
        **setting.model_case(target, model),
        **{name: machine[name] for name in ("cpu", "gpu", "torch")},
        "verify": str(verify),
        "version": treeverify.__version__,
        "grid": {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(grid).items()},
    }

    def measure() -> CostTable:
        with progress(grid.points()) as advance:
            return step_costs.measure(target, drafter, verify, grid, advance)

    if key["weights"] == "unknown":
        return AutoBudget(measure())
    return AutoBudget(step_costs.load_or_measure(CostCache(key), measure))
