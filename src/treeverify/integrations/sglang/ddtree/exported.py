"""DDTREE's counters as Prometheus metrics, beside those of the verify backend (``control.metrics``).

Labels: ``group`` (data-parallel) and ``rank``, and one more where it says so. Every few seconds they follow what
``Metrics`` counts anyway; nothing waits for the device.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from treeverify.integrations.sglang.ddtree.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

PERIOD_S = 5.0
PREFIX = "treeverify_ddtree_"
COUNTERS = {
    "steps": "Steps; each plain step of a run counts.",
    "request_steps": "Steps, times the requests of each.",
    "plain_request_steps": "Those of them that were plain steps, without a draft.",
    "nodes": "Verified nodes, the roots among them.",
    "tokens": "Tokens that drafted steps gave out.",
    "pauses": "Pauses of drafting (widths by cost).",
    "unmatched": "Outcomes that no step could be found for (widths by cost): 0, or something is wrong.",
}
"""Without ``PREFIX`` and their suffix ``_total``."""
LABELLED = {
    "acceptance": ("length", "Drafted steps, times requests, by acceptance length, the root counted."),
    "host_seconds": ("stage", "Seconds of the host by stage of a step; on a GPU those of launching."),
    "width_steps": ("width", "Steps by width (widths by cost)."),
}
"""Counters with one more label."""
GAUGES = {
    "gain": "Tokens per time of recent drafted steps over plain steps' (widths by cost); below 1 drafting loses.",
    "calibration": "Accepted over expected drafts (widths by cost).",
}


class Exported:
    """The metrics of one worker, in ``registry`` (None: prometheus_client's own).

    In multiprocess mode, which SGLang uses, make this only after ``PROMETHEUS_MULTIPROC_DIR`` is set.
    """

    def __init__(self, group: int, rank: int, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        where = REGISTRY if registry is None else registry
        self._place = str(group), str(rank)
        self._counters: dict[str, Counter] = {}
        told = {name: ((), text) for name, text in COUNTERS.items()} | {
            name: ((label,), text) for name, (label, text) in LABELLED.items()
        }
        for name, (labels, text) in told.items():
            self._counters[name] = Counter(PREFIX + name, text, ("group", "rank", *labels), registry=where)
        self._gauges: dict[str, Gauge] = {
            name: Gauge(PREFIX + name, text, ("group", "rank"), registry=where, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._seen: dict[tuple[str, ...], float] = {}
        self._due = 0.0

    def tick(self, metrics: Metrics) -> None:
        """Set everything to what ``metrics`` says, if the last time was long enough ago."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + PERIOD_S
            self.update(metrics)

    def update(self, metrics: Metrics) -> None:
        """Set everything to what ``metrics`` says."""
        auto = metrics.choices() or {}
        for name in COUNTERS:
            value = auto.get(name, getattr(metrics, name, 0))
            self._count(value, name)
        for length, count in metrics.accepted.items():
            self._count(count, "acceptance", str(length))
        for stage, seconds in metrics.seconds.items():
            self._count(seconds, "host_seconds", stage)
        for width, steps in auto.get("widths", {}).items():
            self._count(steps, "width_steps", width)
        for name, gauge in self._gauges.items():
            if name in auto:
                gauge.labels(*self._place).set(auto[name])

    def _count(self, value: float, name: str, *labels: str) -> None:
        """A counter can only be raised: by what is new since the last time, or by all of it after a restart."""
        key = (name, *labels)
        before = self._seen.get(key, 0)
        self._counters[name].labels(*self._place, *labels).inc(value - before if value >= before else value)
        self._seen[key] = value
