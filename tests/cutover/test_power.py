"""False alarms and power on the embedded engine: a small form of ``scripts/cutover_power.py`` and its record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scripts.cutover_power import drawn, take

from treeverify.bench.record import read
from treeverify.cutover.limits import Limits
from treeverify.cutover.sample_gates import statistical
from treeverify.cutover.samples import Plan, Sample

RECORD = Path(__file__).resolve().parents[2] / "benchmarks/results/cutover-power.jsonl"
PLAN = Plan.builtin(12, new_tokens=6, probes=2, speed_passes=0)
DRAWN = 24


def closed(pair: tuple[Sample, Sample], draws: int) -> float:
    """Share of draws of ``DRAWN`` prompts, with replacement, in which a statistical gate closes."""
    random = np.random.default_rng(7)
    found = 0
    for _ in range(draws):
        chosen = random.integers(0, len(PLAN.prompts), DRAWN).tolist()
        found += not all(verdict.passed for verdict in statistical("on", *drawn(pair, chosen), Limits()))
    return found / draws


@pytest.mark.slow
def test_two_swapped_heads_are_found_and_a_right_kernel_is_not_suspected():
    baseline = take("off", "float32", PLAN)
    assert closed((baseline, take("on", "float32", PLAN)), 200) <= 0.01
    assert closed((baseline, take("swapped-heads", "float32", PLAN)), 40) >= 0.8


def test_the_committed_record_keeps_its_promises():
    found = [(entry["impl"], entry["case"], entry["measures"]["closed"]) for entry in read(RECORD, "cutover-power")]
    right = [(case["draws"], count["any statistic"]) for impl, case, count in found if impl == "on"]
    assert right
    assert all(draws >= 200 and alarms <= 0.01 * draws for draws, alarms in right)
    swapped = [
        count["any statistic"] / case["draws"]
        for impl, case, count in found
        if impl == "swapped-heads" and case["prompts"] == DRAWN
    ]
    assert swapped
    assert min(swapped) >= 0.8
