"""DDTREE's counters at ``/metrics``; without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from treeverify.integrations.sglang.ddtree import exported, plugin
from treeverify.integrations.sglang.ddtree.exported import COUNTERS, GAUGES, LABELLED, PERIOD_S, PREFIX, Exported
from treeverify.integrations.sglang.ddtree.metrics import STAGES, Metrics

AUTO = {"widths": {"1": 8, "5": 2}, "calibration": 0.5, "gain": 1.5, "pauses": 3, "unmatched": 1, "ladder": [1, 5]}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, {"group": "0", "rank": "1", **labels})


def counted(choices: Any = None) -> Metrics:
    """Two requests: a drafted step of 5 nodes that accepts 2 and 0 drafts, and four plain ones."""
    metrics = Metrics(9, 8, choices)
    metrics.step(2, 5)
    metrics.accept([3, 1])
    metrics.step(2, 1, 4)
    metrics.seconds["draft"] = 0.25
    return metrics


def test_every_counter_is_exported(registry: CollectorRegistry) -> None:
    Exported(0, 1, registry).update(counted(SimpleNamespace(report=lambda: AUTO)))
    expected = {"steps": 5, "request_steps": 10, "plain_request_steps": 8, "nodes": 18, "tokens": 4}
    expected |= {"pauses": 3, "unmatched": 1}
    assert {name: value(registry, f"{name}_total") for name in COUNTERS} == expected
    assert [value(registry, "acceptance_total", length=length) for length in "123"] == [1, None, 1]
    assert {stage: value(registry, "host_seconds_total", stage=stage) for stage in STAGES} == {
        stage: 0.25 * (stage == "draft") for stage in STAGES
    }
    assert [value(registry, "width_steps_total", width=width) for width in ("1", "5", "9")] == [8, 2, None]
    assert {name: value(registry, name) for name in GAUGES} == {"gain": 1.5, "calibration": 0.5}


def test_counters_follow_and_start_again(registry: CollectorRegistry) -> None:
    metrics, found = counted(), Exported(0, 1, registry)
    for steps, total in ((5, 5), (5, 5), (9, 9), (1, 10)):
        metrics.steps = steps
        found.update(metrics)
        assert value(registry, "steps_total") == total


@pytest.mark.parametrize("choices", [None, SimpleNamespace(report=lambda: None)])
def test_a_fixed_width_has_no_choices(registry: CollectorRegistry, choices: Any) -> None:
    """Nor has one by cost before there are costs."""
    Exported(0, 1, registry).update(counted(choices))
    assert value(registry, "pauses_total") == 0
    assert all(value(registry, name) is None for name in GAUGES)
    assert value(registry, "nodes_total") == 18


def test_updates_are_a_period_apart(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(exported.time, "monotonic", lambda: clock.now)
    metrics, found = counted(), Exported(0, 1, registry)
    for later, steps, shown in ((0.0, 5, 5), (PERIOD_S - 1, 7, 5), (PERIOD_S, 8, 8)):
        clock.now, metrics.steps = 100.0 + later, steps
        found.tick(metrics)
        assert value(registry, "steps_total") == shown


def test_names_do_not_meet() -> None:
    assert len({*COUNTERS, *LABELLED, *GAUGES}) == len(COUNTERS) + len(LABELLED) + len(GAUGES)


@pytest.mark.parametrize("enabled", [False, True])
def test_metrics_that_fail_do_not_end_serving(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, enabled: bool
) -> None:
    made: list[tuple[int, int]] = []

    class Broken:
        def __init__(self, *place: int) -> None:
            made.append(place)  # type: ignore[arg-type]

        def tick(self, _: Metrics) -> None:
            raise OSError("disk full")

    monkeypatch.setattr(plugin, "_workers", [])
    monkeypatch.setattr(plugin, "Exported", Broken)
    monkeypatch.setattr(plugin, "metrics_enabled", lambda: enabled)
    monkeypatch.setattr(plugin, "place", lambda _: (2, 3))
    metrics = counted()
    after = plugin._add(metrics, None)
    after()
    after()
    assert made == [(2, 3)] * enabled
    assert len(caplog.records) == int(enabled)
    report = plugin.report()
    assert report is not None
    assert report["steps"] == 5
