"""The plugin's rounds: at a bounded rate, and never waiting for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from treeverify.integrations.sglang import observer
from treeverify.integrations.sglang.observer import Observer


class Recorder:
    """Notes what is called on it, by name and arguments."""

    def __init__(self, log: list[Any], name: str) -> None:
        self._log, self._name = log, name

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments, **options: self._log.append((self._name, method, *arguments, *options.items()))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(now=100.0)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(observer, "time", fake)
    return fake


def _observer(log: list[Any], with_metrics: bool = True, with_dumps: bool = True) -> Observer:
    backend: Any = SimpleNamespace(
        counters=Recorder(log, "counters"), dumper=Recorder(log, "dumper") if with_dumps else None
    )
    exported: Any = Recorder(log, "metrics") if with_metrics else None
    return Observer([backend], lambda: "state", exported, period=5.0)  # type: ignore[arg-type, return-value]


def test_a_round_updates_drains_without_waiting_and_starts_the_next_snapshot(clock: SimpleNamespace) -> None:
    log: list[Any] = []
    _observer(log).tick()
    assert log == [("dumper", "drain", ("wait", False)), ("metrics", "update", ["state"]), ("counters", "snapshot")]


def test_rounds_are_a_period_apart(clock: SimpleNamespace) -> None:
    log: list[Any] = []
    watching = _observer(log)
    for now in (100.0, 100.0, 104.9, 105.0, 105.1, 109.9, 117.0):
        clock.now = now
        watching.tick()
    assert len([entry for entry in log if entry[0] == "metrics"]) == 3


def test_without_metrics_dumps_are_still_written(clock: SimpleNamespace) -> None:
    log: list[Any] = []
    _observer(log, with_metrics=False).tick()
    assert [entry[0] for entry in log] == ["dumper"]


def test_without_dumps_there_is_nothing_to_drain(clock: SimpleNamespace) -> None:
    log: list[Any] = []
    _observer(log, with_dumps=False).tick()
    assert [entry[0] for entry in log] == ["metrics", "counters"]
