"""The report of a cutover: one self-contained page, and the same as JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

import treeverify
from treeverify.control.schema import PluginState
from treeverify.cutover import figures, replacing
from treeverify.cutover.samples import Sample
from treeverify.cutover.verdict import Verdict, few
from treeverify.errors import ConfigError

VERSION = 1
WORST = 12
"""Layers that the table of worst rows shows."""


def write(
    path: Path,
    journal_events: Sequence[Mapping[str, object]],
    verdicts: Sequence[Verdict],
    samples: Mapping[str, Sample],
    states: Mapping[str, Sequence[PluginState]],
) -> Path:
    """Write ``path`` (HTML) and the same with suffix ``.json``; on an error neither is new. Returns ``path``.

    Journal events are shown in order as the timeline: ``at`` (ISO 8601 or seconds since the epoch) and ``event`` are
    needed, ``stage`` and ``detail`` are shown if there. ``samples``: ``baseline`` and one for each stage that took one,
    in order. ``states``: by the name of the moment, in order; the histograms are drawn from the last one with layers.
    Raises ConfigError if it cannot be written.
    """
    content = {
        "version": VERSION,
        "treeverify": treeverify.__version__,
        "verdict": headline(verdicts),
        "events": [dict(event) for event in journal_events],
        "verdicts": [verdict.model_dump(mode="json") for verdict in verdicts],
        "samples": {name: sample.model_dump(mode="json") for name, sample in samples.items()},
        "states": {name: [state.model_dump(mode="json") for state in found] for name, found in states.items()},
    }
    _write_both(
        {path.with_suffix(".json"): json.dumps(content), path: page(journal_events, verdicts, samples, states)},
    )
    return path


def _write_both(texts: Mapping[Path, str]) -> None:
    """Write beside each file first and move last, so that an error leaves the old ones."""
    file = next(iter(texts))
    try:
        for file, text in texts.items():
            replacing.write_partial(file, text.encode())
        for file in texts:
            replacing.move(file)
    except OSError as error:
        for written in map(replacing.partial, texts):
            written.unlink(missing_ok=True)
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def headline(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """``passed``, in one line why, and which gates were not judged."""
    closed = [verdict for verdict in verdicts if verdict.passed is False]
    judged = [verdict for verdict in verdicts if verdict.passed is not None]
    left = [f"{verdict.gate} ({verdict.stage})" for verdict in verdicts if verdict.passed is None]
    if not judged:
        return {"passed": False, "why": "nothing was judged", "not_judged": left}
    if closed:
        why = few([f"{v.gate} ({v.stage}): {v.reason}" for v in closed])
        return {"passed": False, "why": why, "not_judged": left}
    stages = ", ".join(dict.fromkeys(verdict.stage for verdict in verdicts))
    return {
        "passed": True,
        "why": f"all {len(judged)} judged gates are open, in the stages {stages}",
        "not_judged": left,
    }


def page(
    journal_events: Sequence[Mapping[str, object]],
    verdicts: Sequence[Verdict],
    samples: Mapping[str, Sample],
    states: Mapping[str, Sequence[PluginState]],
) -> str:
    """The page as text: no script, nothing fetched."""
    counted = next((found for found in reversed(list(states.values())) if figures.layers_of(found)), [])
    baseline = samples.get("baseline")
    later = [name for name in samples if name != "baseline"]
    pair = (baseline, samples[later[-1]]) if baseline is not None and later else None
    drawn = {
        "heat_map": figures.heat_map(counted),
        "acceptance": figures.acceptance(samples),
        "forced": figures.forced(*pair) if pair else "",
        "speed": figures.speed(samples),
    }
    template = Environment(loader=PackageLoader("treeverify.cutover"), autoescape=True).get_template(
        "parity-report.html.j2"
    )
    return template.render(
        version=treeverify.__version__,
        headline=headline(verdicts),
        events=[_event(event) for event in journal_events],
        verdicts=verdicts,
        figures={name: Markup(svg) for name, svg in drawn.items()},
        compared=f"{later[-1]} against baseline" if pair else "",
        trees=[(Markup(tree.svg), tree.caption) for tree in (figures.trees(*pair) if pair else [])],
        worst=_worst(counted),
        samples=samples,
        servers=_servers(states),
        shown=shown,
    )


def shown(value: object) -> str:
    """A figure as the table shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def _event(event: Mapping[str, object]) -> dict[str, str]:
    at = event["at"]
    if isinstance(at, int | float):
        at = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    return {
        "at": str(at),
        "event": str(event["event"]),
        "stage": str(event.get("stage", "")),
        "detail": str(event.get("detail") or ""),
    }


def _worst(states: Sequence[PluginState]) -> list[dict[str, object]]:
    """The layers with the worst rows, worst first."""
    found = [{"rank": rank, **counts.model_dump()} for rank, counts in figures.layers_of(states)]
    found.sort(key=lambda row: (row["mismatched_rows"] > 0, row["max_row_ulp"]), reverse=True)
    return found[:WORST]


def _servers(states: Mapping[str, Sequence[PluginState]]) -> list[dict[str, object]]:
    """One row per moment and rank: who served, in which mode, on what."""
    return [
        {
            "moment": moment,
            "rank": rank.rank,
            "pid": rank.pid,
            "mode": rank.mode.value,
            "switches": rank.switches,
            "engine": state.engine,
            "version": state.version,
            "kernels": ", ".join(sorted({f"{backend.kernel} on {backend.device}" for backend in rank.backends})),
            "served": ", ".join(
                f"{name} {counts.calls}" for backend in rank.backends for name, counts in backend.served.items()
            ),
        }
        for moment, found in states.items()
        for state in found
        for rank in state.ranks
    ]
