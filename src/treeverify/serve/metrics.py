"""``/metrics``: what the requests did, and the figures of ``control.schema`` as Prometheus families."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from treeverify.control.schema import PluginState, RankState
from treeverify.env import VerifyMode


class Requests:
    """Counts of answered and failed requests; used by the event loop's thread alone."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "treeverify_request_seconds", "seconds from request to answer, waiting included", registry=self.registry
        )
        self._tokens = Counter("treeverify_generated_tokens", "new tokens given out", registry=self.registry)
        self._failed = Counter(
            "treeverify_failed_requests", "requests that ended because a step raised", registry=self.registry
        )

    def done(self, tokens: int, seconds: float) -> None:
        """Count one answered request."""
        self._tokens.inc(tokens)
        self._seconds.observe(seconds)

    def failed(self) -> None:
        """Count one request that got an error instead of an answer."""
        self._failed.inc()


def exposition(state: PluginState, requests: Requests) -> bytes:
    """Both as the text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_State(state))
    return generate_latest(requests.registry) + generate_latest(registry)


class _State:
    """A collector of one state, which is read once and thrown away."""

    def __init__(self, state: PluginState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        modes = GaugeMetricFamily("treeverify_mode", "1 for the mode that is served", labels=["rank", "mode"])
        switches = CounterMetricFamily("treeverify_mode_switches", "live switches", labels=["rank"])
        for rank in self._state.ranks:
            for mode in VerifyMode:
                modes.add_metric([str(rank.rank), mode.value], float(mode is rank.mode))
            switches.add_metric([str(rank.rank)], rank.switches)
        yield from (modes, switches)
        yield from _served(self._state.ranks)
        yield from _differences(self._state.ranks)


def _served(ranks: list[RankState]) -> Iterator[Metric]:
    passes = CounterMetricFamily("treeverify_verify_passes", "verify passes by mode", labels=["rank", "mode"])
    breaches = CounterMetricFamily("treeverify_breaches", "validate calls beyond the bound", labels=["rank"])
    for rank in ranks:
        for backend in rank.backends:
            for mode, counts in backend.served.items():
                passes.add_metric([str(rank.rank), mode], counts.calls)
            breaches.add_metric([str(rank.rank)], backend.breaches)
    yield from (passes, breaches)


def _differences(ranks: list[RankState]) -> Iterator[Metric]:
    labels = ["rank", "layer"]
    rows = CounterMetricFamily("treeverify_validate_rows", "(node, head) rows compared", labels=labels)
    mismatched = CounterMetricFamily("treeverify_validate_mismatched_rows", "NaN or Inf in one result", labels=labels)
    worst = GaugeMetricFamily("treeverify_validate_max_row_ulp", "worst difference, bfloat16 ULP", labels=labels)
    for rank in ranks:
        for layer in (layer for backend in rank.backends for layer in backend.layers):
            place = [str(rank.rank), str(layer.layer)]
            rows.add_metric(place, layer.rows)
            mismatched.add_metric(place, layer.mismatched_rows)
            worst.add_metric(place, layer.max_row_ulp)
    yield from (rows, mismatched, worst)
