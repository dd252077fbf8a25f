"""The page of the attention benchmark, made from its records: tables, comparisons, roofline plot. Nothing is typed in.

``python -m treeverify.bench.roofline RECORDS.jsonl`` writes ``docs/evidence/attention-benchmark.md`` and its plot
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treeverify.bench import record
from treeverify.bench.attention import NOT_RUN
from treeverify.bench.roofline_plot import draw
from treeverify.bench.timing import median
from treeverify.bench.workloads import Point, parse_point
from treeverify.errors import ConfigError

Key = tuple[str, str]
"""Implementation and index layout."""

COLUMNS: tuple[Key, ...] = (
    ("treeverify-portable", "scatter"),
    ("treeverify-portable", "contig"),
    ("treeverify-portable-served", "scatter"),
    ("treeverify-portable-99k", "scatter"),
    ("treeverify-portable-99k", "contig"),
    ("treeverify-naive", "scatter"),
    ("triton-extend", "scatter"),
    ("fa3-cascade", "scatter"),
    ("fa2-mla", "scatter"),
    ("fa3-causal", "scatter"),
    ("flashmla-causal", "page64"),
)
COMPARISONS: tuple[tuple[str, str], ...] = (
    ("treeverify-portable", "triton-extend"),
    ("treeverify-portable", "fa3-cascade"),
    ("treeverify-portable", "fa2-mla"),
    ("treeverify-portable", "flashmla-causal"),
    ("treeverify-portable", "treeverify-naive"),
    ("treeverify-portable-99k", "triton-extend"),
    ("treeverify-portable-99k", "fa3-cascade"),
    ("treeverify-portable-99k", "fa2-mla"),
    ("treeverify-portable-99k", "treeverify-naive"),
)
OURS = ("treeverify-portable", "treeverify-portable-99k")
_CONTEXT = """\
Our tree-verify kernel beside the kernels that serve MLA today, with the machine's own ceilings.

- `treeverify-portable-99k` keeps within the 99 KiB of shared memory that sm_86, sm_89 and sm_120 have. Its times below
  are those of the GPU named at the end of this page.
- On sm_120 the kernels are compiled and resource-checked, not measured.
- For orientation: an earlier kernel of this kind reached 1.7-4.2x over its naive baseline on an RTX PRO 6000 (sm_120),
  and 3-6x end to end.
"""

_LEGEND = """\
How to read the table:

- *Point*: requests / nodes / query heads / prefix tokens.
- *Floor*: the larger of least bytes over the copy rate (me) and operations over the matrix rate (mm). Both rates were
  measured in the same run.
- *Layouts*: slots in random order, or in a row (`contig`), or in random pages of 64 (`page64`).
- `fa2-mla`, `fa3-causal` and `flashmla-causal` know no tree. They compute a causal chain.
- `-served` is the same kernel in a graph that must serve any prefix, so it is told no bound on the lengths. The hosts
  of the others know the lengths.
- Times are medians of interleaved rounds of CUDA-graph replays. KV sets rotate and outgrow L2.
- Data and trees are random.
"""


@dataclass(frozen=True)
class Results:
    """The newest measurement of each point and column."""

    cells: Mapping[Point, Mapping[Key, record.Record]]
    ceilings: Mapping[str, float]

    @classmethod
    def of(cls, records: Sequence[record.Record]) -> Results:
        """Group records; a later one replaces an earlier one of the same point and column, if it ran."""
        cells: dict[Point, dict[Key, record.Record]] = {}
        rates: dict[str, list[float]] = {}
        for entry in records:
            if entry["benchmark"] == "attention":
                row = cells.setdefault(point_of(entry), {})
                key = entry["impl"], entry["case"]["indices"]
                if key not in row or not (entry["reason"] or "").startswith(NOT_RUN):
                    row[key] = entry
            elif entry["benchmark"] == "ceiling" and entry["rate"] is not None:
                rates.setdefault(entry["impl"], []).append(entry["rate"])
        if not cells:
            raise ConfigError("roofline: no attention records")
        return cls(cells, {name: median(values) for name, values in rates.items()})

    def us(self, point: Point, key: Key) -> float | None:
        """Median microseconds, or None if it was not measured."""
        entry = self.cells[point].get(key)
        return None if entry is None else entry["us"]

    def of_implementation(self, point: Point, name: str) -> float | None:
        """Microseconds in the layout that the implementation is compared in: page 64 or else scattered."""
        found = self.us(point, (name, "scatter"))
        return self.us(point, (name, "page64")) if found is None else found


def point_of(entry: record.Record) -> Point:
    """The point of an attention record."""
    case = entry["case"]
    return parse_point("/".join(str(case[name]) for name in ("bs", "nodes", "heads", "prefix")))


def page(records: Sequence[record.Record], plot: str | None = None) -> str:
    """The whole Markdown page; ``plot`` is the picture's address relative to it."""
    results = Results.of(records)
    newest = max((entry for entry in records if entry["benchmark"] == "attention"), key=lambda entry: entry["date"])
    parts = ["# Attention benchmark\n", _CONTEXT]
    if plot is not None:
        parts.append(f"![Roofline]({plot})\n")
    parts += ["## Microseconds per call (times the floor)\n", times_table(results), _LEGEND]
    parts += ["## Ours against the others\n", comparison_table(results)]
    parts += ["## Share of the ceilings\n", share_table(results)]
    parts += ["## Relative error against float64\n", error_table(results)]
    parts += ["## Not measured\n", missing_list(results)]
    parts += ["## Machine\n", _machine(newest, results)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def times_table(results: Results) -> str:
    """One row per point, one column per implementation and layout that was measured anywhere."""
    columns = [key for key in COLUMNS if any(results.us(point, key) for point in results.cells)]
    header = ["point", "floor", *(_title(key) for key in columns)]
    rows = []
    for point, cells in results.cells.items():
        any_cell = next((cell for cell in cells.values() if cell["floor_us"] is not None), None)
        floor = "" if any_cell is None else f"{any_cell['floor_us']:.1f} {_short(any_cell['bound'])}"
        rows.append([str(point), floor, *(_cell(cells.get(key)) for key in columns)])
    return _table(header, rows)


def comparison_table(results: Results) -> str:
    """How many times faster ours is: least, median, most, and at how many points it is faster at all."""
    rows = []
    for ours, other in COMPARISONS:
        ratios = {}
        for point in results.cells:
            mine, theirs = results.us(point, (ours, "scatter")), results.of_implementation(point, other)
            if mine and theirs:
                ratios[point] = theirs / mine
        if ratios:
            least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
            faster = sum(ratio > 1 for ratio in ratios.values())
            low, high = f"{ratios[least]:.2f}x ({least})", f"{ratios[most]:.2f}x ({most})"
            middle = f"{median(list(ratios.values())):.2f}x"
            rows.append([ours, other, low, middle, high, f"{faster} of {len(ratios)}"])
    return _table(["ours", "other", "least", "median", "most", "faster at"], rows)


def share_table(results: Results) -> str:
    """What ours reaches of the copy rate, and of the matrix rates of wgmma and mma.sync."""
    rows = []
    for point, cells in results.cells.items():
        for name in OURS:
            cell = cells.get((name, "scatter"))
            if cell is None or cell["us"] is None:
                continue
            gigabytes, teraflops = point.bytes / cell["us"] / 1e3, point.flops / cell["us"] / 1e6
            rates = cell["rates"]
            of_mma = f"{teraflops * 1e12 / rates['mma_sync']:.0%}" if rates.get("mma_sync") else ""
            shares = [f"{gigabytes * 1e9 / rates['copy']:.0%}", f"{teraflops * 1e12 / rates['matmul']:.0%}", of_mma]
            rows.append([str(point), name, _short(cell["bound"]), f"{gigabytes:.0f}", f"{teraflops:.0f}", *shares])
    return _table(["point", "implementation", "bound", "GB/s", "TFLOP/s", "of copy", "of matmul", "of mma.sync"], rows)


def error_table(results: Results) -> str:
    """Least and largest error of each implementation over the points."""
    rows = []
    for key in COLUMNS:
        errors = [cells[key]["error"] for cells in results.cells.values() if key in cells]
        errors = [error for error in errors if error is not None]
        if errors:
            rows.append([_title(key), f"{min(errors):.2e}", f"{max(errors):.2e}", str(len(errors))])
    return _table(["implementation", "least", "largest", "points"], rows)


def missing_list(results: Results) -> str:
    """Every reason once, with the points it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for point, cells in results.cells.items():
        for (name, _), cell in cells.items():
            if cell["reason"] is not None:
                reasons.setdefault((name, cell["reason"]), []).append(str(point))
    if not reasons:
        return "Nothing: every implementation ran at every point."
    lines = []
    for (name, reason), points in reasons.items():
        where = "all points" if len(points) == len(results.cells) else ", ".join(dict.fromkeys(points))
        lines.append(f"- {name} at {where}: {reason}")
    return "\n".join(lines)


def _machine(newest: record.Record, results: Results) -> str:
    rates = "\n".join(
        f"| {name} | {rate / 1e12:.2f} {'TB/s' if name == 'copy' else 'TFLOP/s'} |"
        for name, rate in results.ceilings.items()
    )
    return (
        f"{newest['gpu']}, driver {newest['driver']}, torch {newest['torch']}, {newest['date'][:10]}. The records name "
        f"their commit.\n\n| measured ceiling | rate |\n|---|---|\n{rates}\n"
    )


def _title(key: Key) -> str:
    name, indices = key
    return name if indices == "scatter" else f"{name} {indices}"


def _short(bound: str) -> str:
    return {"mem": "me", "mma": "mm"}.get(bound, bound)


def _cell(cell: record.Record | None) -> str:
    if cell is None or cell["us"] is None:
        return "-"
    return f"{cell['us']:.1f} ({cell['ratio']:.1f})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m treeverify.bench.roofline``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, default=Path("docs/evidence/attention-benchmark.md"))
    parser.add_argument("--plot", type=Path, default=Path("docs/evidence/img/attention-roofline.svg"))
    chosen = parser.parse_args(arguments)
    records = [entry for path in chosen.records for entry in record.read(path)]
    draw(records, chosen.plot)
    relative = chosen.plot.resolve().relative_to(chosen.page.resolve().parent)
    chosen.page.write_text(page(records, str(relative)), encoding="utf-8")


if __name__ == "__main__":
    main()
