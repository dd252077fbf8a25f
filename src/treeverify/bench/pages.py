"""Pages and pictures of the benchmarks, each from one record (``treeverify bench pages``: the newest)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from treeverify.bench import record
from treeverify.bench.acceptance import COLUMNS, KINDS
from treeverify.bench.record import Record
from treeverify.bench.speed import ratios
from treeverify.bench.step_plot import RECORD, draw_steps, read_steps
from treeverify.bench.walk import BUDGETS
from treeverify.errors import ConfigError

TITLES = {
    "free_running": "free-running",
    "forced_argmax": "teacher-forced, argmax",
    "forced_text": "teacher-forced, true text",
}
LEAST_AUTO = 0.97
"""Tokens/s of the budget by cost over the best fixed draft: what the whole interval should be above."""
STEPS = Path("img/decode-step.svg")
"""The picture of a decode step, beside the pages."""
_COLOURS = {"free_running": "#0b6e4f", "forced_argmax": "#3a6fbf", "forced_text": "#b26a00"}


def acceptance_page(entry: Record, plot: str) -> str:
    """The page in Markdown; ``plot`` is the picture's path relative to it."""
    case, measures = entry["case"], entry["measures"]
    walks, errors, repeats = measures["walk"], measures["walk_standard_error"], measures["repeated_8grams"]

    def walked(kind: str, column: str) -> str:
        return f"{walks[kind][column]:.2f} ± {errors[kind][column]:.2f}"

    def mean(kind: str, column: str) -> str:
        return f"{measures['mean_over_starts'][kind][column]:.2f}"

    gains = [
        [TITLES[kind], *(f"{walks[kind][column] / walks[kind]['chain']:.2f}x" for column in COLUMNS[1:])]
        for kind in KINDS
    ]
    header = ["", f"chain ({case['depth']})", f"prompt lookup ({case['depth']})", *(f"tree {n}" for n in BUDGETS)]
    sections = [
        "# Acceptance length\n",
        "How many tokens one verify step commits, the root counted. A draft tree of 16 nodes is compared with the "
        "chain of the same drafter and with prompt lookup.\n",
        f"{case['prompts']} held-out prompts of {case['prompt_tokens']} tokens, {case['new_tokens']} tokens walked "
        "after each, temperature 0.\n",
        "- *Tree N*: DDTree with N nodes beside the root.\n"
        "- *Prompt lookup*: a chain copied from behind an earlier occurrence of the last tokens.\n"
        "- *Free-running*: over the target's own greedy continuation, as an engine runs.\n"
        "- *Teacher-forced*: over the true text. Accepted is what equals the target's argmax on the true prefix, or "
        "the true text's own token.\n"
        "- ± is the standard error over the choice of texts.\n\n"
        "Exact definitions are in the docstring of `src/treeverify/bench/acceptance.py`.\n",
        _grid(header, KINDS, walked),
        f"\n![Acceptance length over the budget]({plot})\n",
        f"**The teacher-forced rows say what the drafter is worth.** {repeats['free_running']:.0%} of the free-running "
        f"text are repeated 8-grams, {repeats['true_text']:.1%} of the true text. The small model falls into loops, "
        "which any drafter guesses well, even prompt lookup without a model.\n",
        "## Over the same drafter's chain\n",
        _table(["", *header[2:]], gains),
        "\n## Mean over all starts\n",
        "Every place of the text counts once, visited by the walk or not.\n",
        _grid(header, KINDS, mean),
        _made_by("acceptance", entry),
    ]
    return "\n".join(sections) + "\n"


def draw_acceptance(entry: Record, path: Path) -> None:
    """Write the plot as ``path``'s suffix says (svg or png): a line per kind, dashed for chain, dotted for lookup."""
    matplotlib.rcParams["svg.hashsalt"] = "treeverify"  # the same record gives the same file
    walks = entry["measures"]["walk"]
    errors = entry["measures"]["walk_standard_error"]
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for kind in KINDS:
        heights = [walks[kind][str(budget)] for budget in BUDGETS]
        bars = [errors[kind][str(budget)] for budget in BUDGETS]
        axes.errorbar(BUDGETS, heights, bars, marker="o", capsize=3, color=_COLOURS[kind], label=TITLES[kind])
        for column, style in (("chain", "--"), ("lookup", ":")):
            axes.axhline(walks[kind][column], linestyle=style, color=_COLOURS[kind], linewidth=1, alpha=0.8)
    axes.plot([], [], "--", color="#555555", label=f"chain of {entry['case']['depth']}, same colours")
    axes.plot([], [], ":", color="#555555", label=f"prompt lookup of {entry['case']['depth']}")
    axes.set(xscale="log", xlabel="budget: draft nodes beside the root", ylabel="tokens per step, root counted")
    axes.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
    axes.minorticks_off()
    axes.set_ylim(bottom=1)
    axes.set_title("Acceptance length at T = 0, held-out text")
    axes.grid(visible=True, alpha=0.2)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def speed_page(entry: Record) -> str:
    """The page in Markdown."""
    case, modes = entry["case"], entry["measures"]["modes"]
    decode, whole = ratios(modes, "tokens_per_second"), ratios(modes, "tokens_per_second_with_prefill")
    rows = []
    stages = []
    for name, mode in modes.items():
        speeds = [f"{mode['tokens_per_second']:.0f}", f"{decode[name]:.2f}x"]
        both = [f"{mode['tokens_per_second_with_prefill']:.0f}", f"{whole[name]:.2f}x"]
        share = f"{mode['tokens_per_second_spread']:.0%}"
        rows.append([name, f"{mode['acceptance_length']:.2f}", *speeds, share, *both])
        stages.append([name, f"{mode['step_ms']:.2f}", *(f"{value:.2f}" for value in mode["stages"].values())])
    names = [stage.removesuffix("_ms") for stage in modes["plain"]["stages"]]
    loads = entry["measures"]["load_average"]
    sections = [
        "# Tokens per second on the CPU\n",
        "What drafts are worth on a CPU, where verifying more nodes costs more time. Every mode writes the same "
        "tokens.\n",
        f"{case['prompts']} held-out prompts of {case['prompt_tokens']} tokens, one at a time, {case['new_tokens']} "
        f"new tokens each, temperature 0, free-running, `KDTREE_VERIFY={case['verify']}`. Figures are medians of "
        f"{case['runs']} interleaved runs. Spread is the largest minus the smallest run, over the median. The load "
        f"average was {loads[0]:.1f} before and {loads[1]:.1f} after.\n",
        _table(["draft", "acceptance", "tokens/s", "over plain", "spread", "with prefill", "over plain"], rows),
        _auto_text(entry["measures"].get("auto")),
        "\n## Milliseconds of a step, by stage\n",
        _table(["draft", "step", *names], stages),
        _made_by("speed", entry),
    ]
    return "\n".join(section for section in sections if section) + "\n"


def _auto_text(auto: Record | None) -> str:
    """How the budget by cost compares; nothing where it was not measured."""
    if auto is None:
        return ""
    low, high = auto["interval_95"]
    steps = sum(auto["widths"].values())
    shares = ", ".join(f"{width}: {count / steps:.0%}" for width, count in auto["widths"].items())
    return (
        f"\nauto over {auto['best']}, the best of the others: {auto['ratio']:.3f}x, 95% interval {low:.3f} to "
        f"{high:.3f}. The aim is an interval above {LEAST_AUTO}x. Nodes of its trees, root included, by share of "
        f"steps: {shares}.\n"
    )


def write_pages(results: Path, docs: Path) -> list[Path]:
    """Make the pages anew from the newest records in ``results``; returns the files written. ConfigError for none."""
    written = []
    for name in ("acceptance", "speed"):
        source = results / f"{name}.jsonl"
        if not source.is_file():
            continue
        entry = record.read(source, name)[-1]
        page, plot = docs / f"{name}.md", Path("img") / f"{name}.svg"
        if name == "acceptance":
            draw_acceptance(entry, docs / plot)
            written.append(docs / plot)
        text = acceptance_page(entry, str(plot)) if name == "acceptance" else speed_page(entry)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        written.append(page)
    if (results / RECORD).is_file():
        draw_steps(read_steps(results / RECORD), docs / STEPS)
        written.append(docs / STEPS)
    if not written:
        raise ConfigError(f"{results}: no acceptance.jsonl, no speed.jsonl and no {RECORD}")
    return written


def _made_by(name: str, entry: Record) -> str:
    """The last line of a page: what made it, and on what."""
    case = entry["case"]
    machine = f"{entry['cpu']}, threads: {case['threads']}" if case["device"] == "cpu" else entry["gpu"]
    return (
        f"\nMade by `treeverify bench {name}` from `benchmarks/results/{name}.jsonl`: {machine}, {case['dtype']}, "
        f"torch {entry['torch']}, {entry['date'][:10]}. The record names commit and weights."
    )


def _grid(header: Sequence[str], kinds: Sequence[str], cell: Callable[[str, str], str]) -> str:
    return _table(header, [[TITLES[kind], *(cell(kind, column) for column in COLUMNS)] for kind in kinds])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
