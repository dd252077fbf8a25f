"""The embedded server under a restart command, with the gates themselves: what a new process has not compared is."""

from __future__ import annotations

import pytest
from tests.cutover.conftest import Bench

pytestmark = pytest.mark.slow
EAGER = ("--allow-restart", "--eager", "STAGE=eager")


@pytest.fixture
def served(tmp_path, driver):
    bench = Bench(tmp_path, driver, server=("-m", "treeverify", "serve", "--port", "{port}"))
    bench.settings(
        builtin_prompts=13,  # statistics need 12
        sampling={"new_tokens": 12, "probes": 1, "probe_tokens": 4, "speed_passes": 0},
        limits={"rows": 500, "speed_ratio": None},  # a test is not timed
    )
    bench.boot()
    yield bench
    bench.stop()


def test_by_an_eager_stage_to_on_and_back(served):
    first = served.pid()
    outcome = served.run("on", *EAGER, closed="real")
    assert outcome.code == 0, outcome.out
    assert served.modes() == ("on", "on")
    assert "stage validate-eager" in outcome.out
    assert served.pid() != first
    verdicts = served.status()["verdicts"]
    assert {verdict["gate"] for verdict in verdicts if not verdict["passed"]} == {"speed"}  # not judged
    assert served.rollback().code == 0
    assert served.modes() == ("off", "off")
    assert not served.owned.exists()
