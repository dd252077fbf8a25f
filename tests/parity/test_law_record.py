"""The recorded run holds what docs/evidence/losslessness.md says; corrected p-values follow from the raw ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from treeverify.bench.record import read
from treeverify.holm import holm
from treeverify.parity.engine_law import ALPHA, CASES, SEEDS
from treeverify.parity.law import LawTest
from treeverify.parity.planted import BUGS

ROOT = Path(__file__).resolve().parents[2]
RECORDS = read(ROOT / "benchmarks/results/law.jsonl", "law")
PAGE = (ROOT / "docs/evidence/losslessness.md").read_text()


def of(impl):
    return [record for record in RECORDS if record["impl"] == impl]


def test_the_null_was_drawn_in_full_and_passes():
    found = of("tree")
    assert [record["case"]["setting"] for record in found] == [str(case.setting) for case in CASES]
    raw, told = [], []
    for record in found:
        measures = record["measures"]
        assert measures["seeds"] == list(SEEDS)
        assert measures["pooled"]["draws"] == len(SEEDS) * measures["draws_per_seed"] >= 20_000
        assert measures["pooled"]["cells"] >= 30
        raw += [*(test["p_value"] for test in measures["tests"]), measures["pooled"]["p_value"]]
        told += [*measures["holm"], measures["pooled_holm"]]
    assert told == pytest.approx(holm(raw))
    assert min(told) > ALPHA
    assert f"**{min(told):.3g}** (alpha {ALPHA})" in PAGE


@pytest.mark.parametrize("name", BUGS)
def test_each_bug_was_found_on_every_prompt(name):
    tests = [LawTest(**record["measures"]["tests"][0]) for record in of(f"tree, planted {name}")]
    assert len(tests) == len(CASES)
    worst = max(test.frequency_p_value for test in tests)
    assert worst < 1e-6
    outside = ", ".join(str(test.impossible) for test in tests)
    assert f"| {name} | {outside} | {worst:.1e} |" in PAGE
