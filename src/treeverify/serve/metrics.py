"""``/metrics``: what the requests did, and the server's state by ``control.metrics``."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest, values

from treeverify.control.metrics import Metrics
from treeverify.control.schema import PluginState

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Requests:
    """Counts of requests by how they ended, beside the state's; used by the event loop's thread alone.

    This process serves alone, so its figures stay in its memory: a ``PROMETHEUS_MULTIPROC_DIR`` that it inherited is
    the folder of another server.
    """

    def __init__(self) -> None:
        """Make every metric, in a registry of its own."""
        values.ValueClass = values.MutexValue
        self._registry = CollectorRegistry()
        self._state = Metrics(0, self._registry)
        self._seconds = Histogram(
            "treeverify_request_seconds", "seconds from request to answer, waiting included", registry=self._registry
        )
        self._tokens = Counter("treeverify_generated_tokens", "new tokens given out", registry=self._registry)
        self._failed = Counter(
            "treeverify_failed_requests", "requests that ended because a step raised", registry=self._registry
        )
        self._aborted = Counter(
            "treeverify_aborted_requests", "requests that ended because their client left", registry=self._registry
        )

    def done(self, tokens: int, seconds: float) -> None:
        """Count one answered request."""
        self._tokens.inc(tokens)
        self._seconds.observe(seconds)

    def failed(self) -> None:
        """Count one request that got an error instead of an answer."""
        self._failed.inc()

    def aborted(self) -> None:
        """Count one request that nobody waits for any longer."""
        self._aborted.inc()

    def exposition(self, state: PluginState) -> bytes:
        """Return these counts and those of ``state`` as the text that Prometheus scrapes."""
        self._state.update(state.ranks)
        return generate_latest(self._registry)
