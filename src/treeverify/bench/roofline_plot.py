"""The roofline plot: operations per byte against operations per second, with the measured ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from treeverify.bench.record import Record
from treeverify.bench.timing import median
from treeverify.bench.workloads import parse_point
from treeverify.errors import ConfigError

STYLES = {
    "treeverify-portable": ("o", "#0b6e4f"),
    "treeverify-portable-99k": ("s", "#3a9fbf"),
    "treeverify-naive": ("v", "#9bbf85"),
    "triton-extend": ("x", "#b23a48"),
    "fa3-cascade": ("D", "#e08e45"),
    "fa2-mla": ("^", "#8d6cab"),
    "flashmla-causal": ("P", "#777777"),
}
"""Marker and colour by implementation; ``fa3-causal`` and contiguous layouts are left out of the picture."""
_ROOFS = (("matmul", "matrix product", "-"), ("mma_sync", "mma.sync loop", "--"))


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the plot as ``path``'s suffix says (svg or png). Raises ``ConfigError`` if there is nothing to show."""
    attention = [entry for entry in records if entry["benchmark"] == "attention" and entry["impl"] in STYLES]
    measured = [entry for entry in attention if entry["us"] is not None and entry["case"]["indices"] != "contig"]
    if not measured:
        raise ConfigError("roofline plot: no measured attention records")
    matplotlib.rcParams["svg.hashsalt"] = "treeverify"  # the same records give the same file
    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    axes = figure.add_subplot()
    intensities = _draw_points(axes, measured)
    _draw_roofs(axes, measured, min(intensities) / 1.5, max(intensities) * 1.5)
    axes.set(xscale="log", yscale="log", xlabel="least work: operations per byte", ylabel="TFLOP/s reached")
    axes.set_title(f"Tree-verify attention on {measured[-1]['gpu']}")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    date = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=date, dpi=130)


def _draw_points(axes: matplotlib.axes.Axes, measured: Sequence[Record]) -> list[float]:
    intensities = []
    for name, (marker, colour) in STYLES.items():
        xs, ys = [], []
        for entry in measured:
            case = entry["case"]
            if entry["impl"] == name:
                point = parse_point("/".join(str(case[key]) for key in ("bs", "nodes", "heads", "prefix")))
                xs.append(point.flops / point.bytes)
                ys.append(point.flops / entry["us"] / 1e6)
        if xs:
            axes.plot(xs, ys, marker, color=colour, label=name, markersize=5, alpha=0.85)
        intensities += xs
    return intensities


def _draw_roofs(axes: matplotlib.axes.Axes, measured: Sequence[Record], low: float, high: float) -> None:
    copy = median([entry["rates"]["copy"] for entry in measured])
    for key, label, style in _ROOFS:
        rates = [entry["rates"][key] for entry in measured if entry["rates"].get(key)]
        if rates:
            roof = median(rates)
            ridge = min(max(roof / copy, low), high)
            heights = [min(copy * x, roof) / 1e12 for x in (low, ridge, high)]
            text = f"{label}: {roof / 1e12:.0f} TFLOP/s"
            axes.plot([low, ridge, high], heights, style, color="black", linewidth=1.2, label=text)
    axes.text(low * 1.05, copy * low / 1e12 * 1.9, f"copy: {copy / 1e12:.2f} TB/s", fontsize=8, rotation=0)
