"""The picture of a decode step with SGLang's kernel and with ours, by prefix, from ``kimi-rank.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from treeverify.errors import ConfigError

RECORD = "kimi-rank.json"
_SIDES = (("off", "SGLang's Triton kernel", "#b26a00"), ("on", "treeverify", "#0b6e4f"))
_HEIGHT = 0.36


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The points of the record, by rising prefix. Raises ConfigError for a file that is no such record."""
    try:
        points: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["points"]
        return sorted(points, key=lambda point: point["prefix"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: expected the record of kimi_rank.py with its points: {error!r}") from None


def draw_steps(points: list[dict[str, Any]], path: Path) -> None:
    """Write the plot as ``path``'s suffix says (svg or png): two bars for each prefix, milliseconds of a step.

    The ground is white, so that the picture can be read on a dark page as well.
    """
    figure = Figure(figsize=(8.0, 2.9), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for side, (mode, label, colour) in enumerate(_SIDES):
        places = [row + (side - 0.5) * (_HEIGHT + 0.02) for row in range(len(points))]
        times = [point[mode]["step_ms"] for point in points]
        axes.barh(places, times, _HEIGHT, color=colour, label=label)
        for place, point, time in zip(places, points, times, strict=True):
            text = f" {time:.0f} ms" if time >= 100 else f" {time:.1f} ms"
            gain = f" ({point['step_ratio']['ratio']:.3g}x as fast)" if mode == "on" else ""
            axes.text(time, place, text + gain, va="center", fontsize=9)
    axes.set_yticks(range(len(points)), [f"{point['prefix']:,} tokens" for point in points])
    axes.invert_yaxis()
    axes.set_xlim(right=1.12 * max(point["off"]["step_ms"] for point in points))
    axes.set_xlabel("milliseconds of a decode step, lower is better")
    axes.set_title("A decode step with a draft tree, by context length")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, loc="upper right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "treeverify"}):  # small, and the same each time
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
