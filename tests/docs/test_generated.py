"""Pages that are made from records and code equal what is made today."""

from __future__ import annotations

import pytest
from tests.docs.prose import ROOT

from treeverify.bench import pages, record, roofline

EVIDENCE = ROOT / "docs/evidence"
RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize("name", ["acceptance", "speed"])
def test_benchmark_pages(name):
    entry = record.read(RESULTS / f"{name}.jsonl", name)[-1]
    made = pages.acceptance_page(entry, "img/acceptance.svg") if name == "acceptance" else pages.speed_page(entry)
    assert (EVIDENCE / f"{name}.md").read_text(encoding="utf-8") == made


def test_the_attention_page():
    made = roofline.page(record.read(RESULTS / "attention.jsonl"), "img/attention-roofline.svg")
    assert (EVIDENCE / "attention-benchmark.md").read_text(encoding="utf-8") == made
