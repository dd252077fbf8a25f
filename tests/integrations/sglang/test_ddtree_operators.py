"""How much a decode step of DDTREE asks of the host outside SGLang's own calls, in operators: a bound, no clock.

Each count is a call from Python that launches something, allocates, or makes a view. A change that adds some must raise
a bound here, and say why.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
pytest.importorskip("sglang", reason="real SGLang: make test-sglang")

from tests.integrations.sglang import ddtree_operators, ddtree_pair  # noqa: E402
from tests.integrations.sglang.processes import outcome  # noqa: E402

MOST = {
    "draft": {"kernels": 1, "operators": 12, "views": 8},  # eight of the operators are bounds of lengths on the host
    "verify": {"kernels": 1, "operators": 1, "views": 3},
    "accept": {"kernels": 1, "operators": 1, "views": 1},
    "commit": {"kernels": 2, "operators": 0, "views": 3},
    "rest": {"kernels": 0, "operators": 1, "views": 1},
}
"""Per step of a greedy batch, SGLang 0.5.23; one more in each step is seen."""
BY_COST = {"draft": {"operators": 4, "views": 8}, "rest": {"operators": 1, "views": 1}}
"""More with widths by cost: scores to the host, and where a step is narrow the fronts of its trees and slots."""


@pytest.mark.parametrize("budget", ["fixed", "auto"])
def test_a_step_asks_no_more_of_the_host(tmp_path: Path, budget: str) -> None:
    ddtree_pair.write(tmp_path)
    environment = {"KDTREE_VERIFY": "off", "TREEVERIFY_CACHE": str(tmp_path / "cache")}
    if budget == "auto":
        environment["KDTREE_BUDGET"] = budget
    found = outcome(ddtree_operators.__file__, tmp_path, **environment)
    assert found["verify"]["sglang"] > 100, "nothing was counted"
    for stage, most in MOST.items():
        for kind, bound in most.items():
            more = BY_COST.get(stage, {}).get(kind, 0) if budget == "auto" else 0
            assert found[stage][kind] <= bound + more, (stage, kind, found)
