"""The whole path on the embedded server as a unit of a real systemd, with the gates themselves; then broken kernels."""

from __future__ import annotations

import json
import sys

import pytest
from tests.cutover.systemd import UnitBench

pytestmark = [pytest.mark.systemd, pytest.mark.slow]
SERVE = f"{sys.executable} -m treeverify serve --port {{port}}"
FAULTS = ["wrong-mask", "scaled", "nan-head", "swapped-heads"]
SETTINGS = {
    "builtin_prompts": 13,  # statistics need 12
    "sampling": {"new_tokens": 16, "probes": 2, "probe_tokens": 4, "speed_passes": 1},
    "limits": {"rows": 1000, "speed_ratio": None},  # a test is not timed
}


@pytest.fixture
def served(systemd, driver_inside, request):
    settings = systemd.log.parent / "settings.json"
    settings.write_text(json.dumps(SETTINGS))
    name = "serve-" + request.node.name.strip("]").rpartition("[")[2].replace("_", "-")
    bench = UnitBench(systemd, driver_inside, systemd.log.parent, name, SERVE, settings=settings)
    yield bench
    bench.stop()


def verdicts(bench):
    return json.loads(bench.cutover("status", "--json").out)["verdicts"]


def test_from_off_by_validate_to_on_and_back(served):
    served.start()
    outcome = served.run("on", closed="real")
    assert outcome.code == 0, outcome.out
    assert served.live() == "on"
    found = verdicts(served)
    assert {verdict["stage"] for verdict in found} == {"validate", "soak", "on"}
    assert {verdict["gate"] for verdict in found if not verdict["passed"]} == {"speed"}  # not judged
    report = next(served.state.glob("*/parity-report.html")).read_text()
    assert served.unit in report or "validate" in report
    served.restart()
    assert (served.live(), served.process()["KDTREE_VERIFY"]) == ("on", "on")
    assert served.cutover("rollback").code == 0
    assert (served.live(), served.owned()) == ("off", [])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_stopped_at_a_gate_and_taken_back(served, fault):
    enough_for_validate = {"builtin_prompts": 4, "sampling": {"new_tokens": 16, "probes": 0, "speed_passes": 0}}
    served.settings.write_text(json.dumps(SETTINGS | enough_for_validate))
    served.environment["TREEVERIFY_FAULT"] = fault
    served.start()
    outcome = served.run("on", closed="real")
    assert outcome.code == 20, outcome.out
    assert "rolled back, proved: gate closed" in outcome.last
    failed = [verdict for verdict in verdicts(served) if verdict["passed"] is False]
    assert {verdict["stage"] for verdict in failed} == {"validate"}
    reason = next(verdict["reason"] for verdict in failed if verdict["gate"] == "parity")
    assert "layer" in reason
    assert "ULP" in reason or "NaN" in reason  # not for want of rows
    assert "rows compared" not in reason
    assert (served.live(), served.owned()) == ("off", [])
    status = json.loads(served.cutover("status", "--json").out)
    assert (status["live"], status["next_start"], status["stage"]) == ("off", "off", "rolled-back")
    assert status["explained"]
