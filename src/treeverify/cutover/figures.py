"""The report's figures, as SVG text to be put into the page."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from treeverify.control.schema import LayerCounts, PluginState
from treeverify.cutover import statistics
from treeverify.cutover.samples import Sample
from treeverify.cutover.statistics import Pair
from treeverify.ops.tree_attention.difference import ROW_EDGES
from treeverify.tree.drawing import svg_tree

BASELINE, CANDIDATE, INK = "#8a94a6", "#1a9467", "#5d6778"
OTHERS = ("#3f7fd0", "#b7791f", "#8e5bb5")
SIDE = 2
"""Unlikelier tokens drawn beside each served one."""


def layers_of(states: Sequence[PluginState]) -> list[tuple[str, LayerCounts]]:
    """Every layer's counts with the name of its rank."""
    return [
        (f"{group}.{rank.rank}" if len(states) > 1 else f"{rank.rank}", counts)
        for group, state in enumerate(states)
        for rank in state.ranks
        for backend in rank.backends
        for counts in backend.layers
    ]


def heat_map(states: Sequence[PluginState]) -> str:
    """Rows by layer and ULP bin, all ranks together; empty where nothing was compared."""
    rows: dict[int, np.ndarray] = {}
    for _, counts in layers_of(states):
        rows[counts.layer] = rows.get(counts.layer, 0) + np.array(counts.histogram)
    if not rows:
        return ""
    layers = sorted(rows)
    grid = np.stack([rows[layer] for layer in layers]).astype(float)
    figure = _figure(8.2, min(9.0, 1.2 + 0.32 * len(layers)))
    axes = figure.subplots()
    shown = np.ma.masked_equal(grid, 0)
    image = axes.imshow(shown, aspect="auto", cmap="viridis", norm=LogNorm(vmin=1, vmax=max(2.0, grid.max())))
    edges = [f"{edge:g}" for edge in ROW_EDGES]
    names = ["0", *(f"≤ {edge}" for edge in edges[1:]), f"> {edges[-1]}"]
    axes.set_xticks(range(len(names)), names)
    step = max(1, len(layers) // 16)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.axvline(3.5, color="#c0392b", linewidth=1.5, linestyle="--")
    axes.set_xlabel("bfloat16 ULP of the row's largest value (dashed: the bound)")
    axes.set_ylabel("layer")
    figure.colorbar(image, label="rows")
    return _svg(figure)


def acceptance(samples: Mapping[str, Sample]) -> str:
    """Share of verify steps by acceptance length, one row of bars for each sample that tells."""
    told = {name: statistics.histograms(sample.generations) for name, sample in samples.items()}
    known = {name: found.sum(0) for name, found in told.items() if found is not None and found.sum()}
    if not known:
        return ""
    figure = _figure(8.2, 3.2)
    axes = figure.subplots()
    width = 0.8 / len(known)
    for index, (name, counts) in enumerate(known.items()):
        lengths = np.arange(1, len(counts) + 1)
        mean = float((counts * lengths).sum() / counts.sum())
        place = lengths + (index - (len(known) - 1) / 2) * width
        axes.bar(
            place, counts / counts.sum(), width, color=_colour(name, index), label=f"{name}: {mean:.3f} over all steps"
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("acceptance length (tokens of one verify step, root counted)")
    axes.set_ylabel("share of steps")
    axes.legend(frameon=False)
    return _svg(figure)


def forced(baseline: Sample, candidate: Sample) -> str:
    """Changes of log-probability on the forced text, and mean divergence of each prompt; empty without pairs."""
    pairs = statistics.forced_pairs(baseline, candidate)
    if not pairs:
        return ""
    figure = _figure(8.2, 3.2)
    left, right = figure.subplots(1, 2)
    changes = np.array([statistics.logprob_change(pair) for pair in pairs])
    left.hist(changes, bins=41, color=CANDIDATE)
    left.set_yscale("log")
    left.set_xlabel("change of log-probability, nats")
    left.set_ylabel("tokens")
    kl = np.sort(statistics.by_prompt(pairs, [statistics.divergence(pair) for pair in pairs]))
    right.plot(np.arange(1, len(kl) + 1), np.maximum(kl, 1e-16), ".", color=CANDIDATE)
    right.set_yscale("log")
    right.set_xlabel("prompts, in order of their mean")
    right.set_ylabel("KL, nats per token")
    return _svg(figure)


def speed(samples: Mapping[str, Sample]) -> str:
    """Tokens per second of each timed request, in the order in which they were asked."""
    timed = {name: sample.speed for name, sample in samples.items() if sample.speed}
    if not timed:
        return ""
    figure = _figure(8.2, 2.8)
    axes = figure.subplots()
    for index, (name, windows) in enumerate(timed.items()):
        rates = [window.tokens / window.seconds for window in windows]
        label = f"{name}: median {np.median(rates):.1f}"
        axes.plot(range(1, len(rates) + 1), rates, ".-", linewidth=0.7, color=_colour(name, index), label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("timed request")
    axes.set_ylabel("tokens per second")
    axes.legend(frameon=False)
    return _svg(figure)


@dataclass(frozen=True)
class Tree:
    """One probe drawn as a tree (``tree.drawing.Drawn``), and the divergence at its worst position."""

    tokens: list[str]
    parents: list[int]
    path: list[int]
    bonus: str
    caption: str

    @property
    def svg(self) -> str:
        """The picture."""
        return svg_tree(self)


def trees(baseline: Sample, candidate: Sample, most: int = 3) -> list[Tree]:
    """The probes with the largest divergence: tokens that both served, with the likeliest others beside them."""
    theirs = {(probe.prompt, probe.offset): probe for probe in candidate.probes}
    found: list[tuple[float, Tree]] = []
    for probe in baseline.probes:
        other = theirs.get((probe.prompt, probe.offset))
        if other is None or other.first != probe.first or not probe.positions:
            continue
        pairs = []
        for mine, its in zip(probe.positions, other.positions, strict=True):
            pairs.append(Pair(probe.prompt, mine, its))
            if mine.token != its.token:
                break
        largest = max(statistics.divergence(pair) for pair in pairs)
        caption = f"{probe.prompt}, {probe.offset} into its forced text: largest KL {largest:.2g} nats"
        found.append((largest, _tree(probe.first, pairs, caption)))
    return [tree for _, tree in sorted(found, key=lambda entry: -entry[0])[:most]]


def _tree(first: int, pairs: Iterable[Pair], caption: str) -> Tree:
    tokens, parents, path = [f"{first}"], [-1], [0]
    *inner, last = pairs
    for pair in (*inner, last):
        served = pair.baseline.token
        for token, logprob in [entry for entry in pair.baseline.top if entry[0] != served][:SIDE]:
            tokens.append(f"{token} {logprob:.2f}")
            parents.append(path[-1])
        if pair is not last:
            tokens.append(f"{served} {pair.baseline.logprob:.2f}")
            parents.append(path[-1])
            path.append(len(tokens) - 1)
    if last.candidate.token != last.baseline.token:
        tokens.append(f"{last.baseline.token} {last.baseline.logprob:.2f}")
        parents.append(path[-1])
    return Tree(tokens, parents, path, f"{last.candidate.token} {last.candidate.logprob:.2f}", caption)


def _colour(name: str, index: int) -> str:
    return {"baseline": BASELINE, "on": CANDIDATE}.get(name, OTHERS[index % len(OTHERS)])


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure) -> str:
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "treeverify", "font.family": "sans-serif", "font.size": 10}
    with mpl.rc_context(style):
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(colors=INK)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
