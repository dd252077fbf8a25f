"""The first screen says how to begin, and no page names a package that no index holds for us."""

from __future__ import annotations

import json
import re

import pytest
from tests.docs.prose import PAGES, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FROM_AN_INDEX = re.compile(r"pip install (?:-\S+ )*[\"']?treeverify(?![\w/-]*[-/])")


def test_the_readme_names_the_commands_and_is_short():
    for command in ("make demo", "make test", "pip install .", "treeverify probe", "treeverify mode"):
        assert command in README
    assert "--speculative-algorithm DDTREE" in README
    assert "--attention-backend treeverify" in README
    assert len(README.splitlines()) <= 90


def test_the_figures_of_the_readme_are_the_records():
    points = json.loads((ROOT / "benchmarks/results/kimi-rank.json").read_text())["points"]
    (point,) = [entry for entry in points if entry["prefix"] == 30_000]
    off, on, ratio = point["off"]["step_ms"], point["on"]["step_ms"], point["step_ratio"]["ratio"]
    assert f"takes {on:.1f} ms instead of {off:.0f} ms: {ratio:.0f}x" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_the_name_from_an_index(page):
    assert FROM_AN_INDEX.findall(page.read_text(encoding="utf-8")) == []


def test_what_counts_as_an_install_from_an_index():
    for text in ("pip install treeverify", 'pip install "treeverify[lab]"', "pip install -U treeverify==1"):
        assert FROM_AN_INDEX.search(text), text
    for text in ("pip install .", 'pip install ".[lab]"', "pip install dist/treeverify-1-py3-none-any.whl"):
        assert not FROM_AN_INDEX.search(text), text
