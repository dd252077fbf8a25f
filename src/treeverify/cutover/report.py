"""The report of a cutover: one self-contained page, and the same as JSON beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from treeverify.control.schema import PluginState
from treeverify.cutover.gates import Verdict
from treeverify.cutover.samples import Sample


def write(
    path: Path,
    journal_events: Sequence[Mapping[str, object]],
    verdicts: Sequence[Verdict],
    samples: Mapping[str, Sample],
    states: Mapping[str, Sequence[PluginState]],
) -> Path:
    """Write ``path`` (HTML) and the same with suffix ``.json``; both or, on an error, neither. Returns ``path``.

    Journal events are shown in order as the timeline: ``at`` (ISO 8601 or seconds since the epoch) and ``event`` are
    needed, ``stage`` and ``detail`` are shown if there. ``samples``: ``baseline`` and, for each stage that took one,
    ``validate``, ``soak``, ``on``. ``states``: by a name of the moment (``before``, ``validate``, ``soak``, ``on``,
    ``after``); the histograms are drawn from the last one with layers. Raises ConfigError if it cannot be written.
    """
    raise NotImplementedError
