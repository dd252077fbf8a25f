"""A server's state as Prometheus metrics: the SGLang plugin and ``treeverify serve`` export the same names.

Labels: ``group`` (data-parallel) and ``rank``, and ``mode`` where it says so; per layer and per reason figures are the
probe's, so that the number of series does not grow with the model. Counters follow the counts of the state; the figures
of a rank's backends (the target's and a drafter's) are summed, of peaks the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from treeverify.control.schema import RankState
from treeverify.env import VerifyMode

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

COUNTERS = {
    "treeverify_mode_switches": "Live switches of the mode.",
    "treeverify_breaches": "Validate calls with a row beyond the bound, or with NaN or infinity in one result only.",
    "treeverify_dumps": "Calls written to dump files.",
    "treeverify_left_to_parent": "Calls that were launched on SGLang's own kernel because ours does not compute them.",
    "treeverify_validate_rows": "(node, head) rows compared in mode validate.",
    "treeverify_validate_mismatched_rows": "Rows in which NaN or infinity are in one result only.",
}
"""Without their suffix ``_total``; labels group, rank."""
MODE_COUNTERS = {
    "treeverify_verify_passes": "Verify passes of the model, by the mode that served them.",
    "treeverify_verify_rows": "(node, head) rows of these passes.",
}
"""Labels group, rank, mode."""
GAUGES = {
    "treeverify_validate_max_row_ulp": "Largest difference so far, in bfloat16 ULP of its row's largest value.",
    "treeverify_validate_max_relative": "Largest |ours - baseline| norm over |baseline| norm of a row so far.",
}
"""Labels group, rank."""
MODE_GAUGE = "treeverify_mode"
"""Labels group, rank, mode: 1 for the mode that is served, 0 for the other two."""


class Metrics:
    """The metrics of one data-parallel group, or of one rank of it, in ``registry`` (None: prometheus_client's own).

    In prometheus_client's multiprocess mode, which SGLang uses, each process writes its ranks and the server's
    ``/metrics`` reads them together. The library looks for that mode when it is imported, so make this only after
    ``PROMETHEUS_MULTIPROC_DIR`` is set.
    """

    def __init__(self, group: int, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        where = REGISTRY if registry is None else registry
        place = ("group", "rank")
        self._group = str(group)
        self._counters: dict[str, Counter] = {}
        for names, labels in ((COUNTERS, place), (MODE_COUNTERS, (*place, "mode"))):
            for name, text in names.items():
                self._counters[name] = Counter(name, text, labels, registry=where)
        self._gauges: dict[str, Gauge] = {}
        for name, text in GAUGES.items():
            self._gauges[name] = Gauge(name, text, place, registry=where, multiprocess_mode="mostrecent")
        self._mode = Gauge(
            MODE_GAUGE,
            "1 for the mode that is served.",
            (*place, "mode"),
            registry=where,
            multiprocess_mode="mostrecent",
        )
        self._seen: dict[tuple[str, ...], int] = {}

    def update(self, ranks: Iterable[RankState]) -> None:
        """Set every metric of ``ranks`` to what their state says. Waits for nothing."""
        for rank in ranks:
            self._update(rank, (self._group, str(rank.rank)))

    def _update(self, rank: RankState, place: tuple[str, str]) -> None:
        layers = [layer for backend in rank.backends for layer in backend.layers]
        counts = {
            "treeverify_mode_switches": rank.switches,
            "treeverify_breaches": sum(backend.breaches for backend in rank.backends),
            "treeverify_dumps": sum(backend.dumps for backend in rank.backends),
            "treeverify_left_to_parent": sum(sum(backend.left_to_parent.values()) for backend in rank.backends),
            "treeverify_validate_rows": sum(layer.rows for layer in layers),
            "treeverify_validate_mismatched_rows": sum(layer.mismatched_rows for layer in layers),
        }
        for name, count in counts.items():
            self._count(name, place, count)
        for mode in VerifyMode:
            served = [backend.served[mode] for backend in rank.backends if mode in backend.served]
            self._count("treeverify_verify_passes", (*place, mode.value), sum(one.calls for one in served))
            self._count("treeverify_verify_rows", (*place, mode.value), sum(one.rows for one in served))
            self._mode.labels(*place, mode.value).set(mode is rank.mode)
        peaks = {
            "treeverify_validate_max_row_ulp": [layer.max_row_ulp for layer in layers],
            "treeverify_validate_max_relative": [layer.max_relative for layer in layers],
        }
        for name, values in peaks.items():
            self._gauges[name].labels(*place).set(max(values, default=0.0))

    def _count(self, name: str, labels: tuple[str, ...], count: int) -> None:
        """A counter can only be raised: by what is new since the last time, or by all of it after a restart."""
        before = self._seen.get((name, *labels), 0)
        self._counters[name].labels(*labels).inc(count - before if count >= before else count)
        self._seen[name, *labels] = count
