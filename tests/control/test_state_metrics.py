from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry
from tests.control.stub import BACKEND, LAYER, rank_state

from treeverify.control.metrics import COUNTERS, GAUGES, MODE_COUNTERS, MODE_GAUGE, Metrics
from treeverify.control.schema import RankState


def _state(**changes: object) -> RankState:
    backend = {**BACKEND, "breaches": 3, "dumps": 2, "left_to_parent": {"option sinks": 4, "logit cap 30": 1}}
    return rank_state(1, **{"backends": [backend], **changes})


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def _value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"group": "0", "rank": "1", **labels})


def test_every_figure_of_a_rank_is_exported(registry: CollectorRegistry) -> None:
    Metrics(0, registry).update([_state()])
    expected = {
        "treeverify_mode_switches_total": 2,
        "treeverify_breaches_total": 3,
        "treeverify_dumps_total": 2,
        "treeverify_left_to_parent_total": 5,
        "treeverify_validate_rows_total": 1024,
        "treeverify_validate_mismatched_rows_total": 0,
        "treeverify_validate_max_row_ulp": 1.0,
        "treeverify_validate_max_relative": 0.0021,
    }
    assert {name: _value(registry, name) for name in expected} == expected
    assert [_value(registry, "treeverify_mode", mode=mode) for mode in ("off", "validate", "on")] == [0, 1, 0]
    assert _value(registry, "treeverify_verify_passes_total", mode="on") == 7
    assert _value(registry, "treeverify_verify_rows_total", mode="validate") == 512


def test_counters_follow_the_state_and_start_again_after_a_restart(registry: CollectorRegistry) -> None:
    metrics = Metrics(0, registry)
    for switches, total in ((2, 2), (2, 2), (5, 5), (1, 6), (2, 7)):
        metrics.update([_state(switches=switches)])
        assert _value(registry, "treeverify_mode_switches_total") == total


def test_a_switch_moves_the_mode(registry: CollectorRegistry) -> None:
    metrics = Metrics(0, registry)
    for mode in ("off", "on"):
        metrics.update([_state(mode=mode)])
        assert {m: _value(registry, "treeverify_mode", mode=m) for m in ("off", "validate", "on")} == {
            m: float(m == mode) for m in ("off", "validate", "on")
        }


def test_backends_are_summed_and_the_larger_peak_counts(registry: CollectorRegistry) -> None:
    draft = {**BACKEND, "layers": [{**LAYER, "max_row_ulp": 1.75, "rows": 8}]}
    Metrics(0, registry).update([_state(backends=[BACKEND, draft])])
    assert _value(registry, "treeverify_validate_rows_total") == 1032
    assert _value(registry, "treeverify_validate_max_row_ulp") == 1.75
    assert _value(registry, "treeverify_verify_passes_total", mode="on") == 14


def test_a_rank_that_only_serves_off_has_its_mode_and_zeros(registry: CollectorRegistry) -> None:
    Metrics(0, registry).update([_state(mode="off", backends=[])])
    assert _value(registry, "treeverify_mode", mode="off") == 1
    assert _value(registry, "treeverify_breaches_total") == 0
    assert _value(registry, "treeverify_validate_max_row_ulp") == 0


def test_the_number_of_series_depends_on_the_ranks_alone(registry: CollectorRegistry) -> None:
    metrics = Metrics(0, registry)

    def series() -> int:
        return sum(not s.name.endswith("_created") for family in registry.collect() for s in family.samples)

    metrics.update([_state()])
    before = series()
    assert before == len(COUNTERS) + len(GAUGES) + 3 * (len(MODE_COUNTERS) + 1)
    many = {**BACKEND, "layers": [{**LAYER, "layer": n} for n in range(61)]}
    metrics.update([_state(backends=[{**many, "left_to_parent": {f"reason {n}": 1 for n in range(50)}}])])
    assert series() == before
    assert MODE_GAUGE in {family.name for family in registry.collect()}


def test_two_processes_are_read_together_in_multiprocess_mode(tmp_path, monkeypatch) -> None:
    code = (
        "import sys; from tests.control.stub import rank_state;"
        "from treeverify.control.metrics import Metrics;"
        "m = Metrics(0); n = int(sys.argv[1]);"
        "[m.update([rank_state(n, switches=2 + n + i)]) for i in range(2)]"
    )
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for number in ("0", "1"):
        subprocess.run([sys.executable, "-c", code, number], check=True)
    read = (
        "from prometheus_client import CollectorRegistry, multiprocess, generate_latest;"
        "r = CollectorRegistry(); multiprocess.MultiProcessCollector(r); print(generate_latest(r).decode())"
    )
    text = subprocess.run([sys.executable, "-c", read], check=True, capture_output=True, text=True).stdout
    assert 'treeverify_mode_switches_total{group="0",rank="0"} 3.0' in text
    assert 'treeverify_mode_switches_total{group="0",rank="1"} 4.0' in text
    assert 'treeverify_mode{group="0",mode="validate",rank="1"} 1.0' in text
