"""The picture of a decode step shows the record's times, is small, and is the same file each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treeverify.bench.pages import STEPS, write_pages
from treeverify.bench.step_plot import RECORD, draw_steps, read_steps
from treeverify.errors import ConfigError

ROOT = Path(__file__).parents[2]


def point(prefix, off, on):
    return {
        "prefix": prefix,
        "off": {"step_ms": off},
        "on": {"step_ms": on},
        "step_ratio": {"ratio": off / on},
    }


def test_the_picture_says_what_the_points_say(tmp_path):
    for name in ("a", "b"):
        draw_steps([point(2048, 20.04, 8.0), point(30_000, 160.4, 8.02)], tmp_path / name / "steps.svg")
    text = (tmp_path / "a/steps.svg").read_text()
    for label in (
        "2,048 tokens",
        "20.0 ms",
        "8.0 ms (2.5x as fast)",
        "30,000 tokens",
        "160 ms",
        "8.0 ms (20x as fast)",
    ):
        assert label in text
    assert text == (tmp_path / "b/steps.svg").read_text()
    assert len(text) < 30_000


def test_points_come_by_rising_prefix_and_other_files_are_refused(tmp_path):
    path = tmp_path / RECORD
    path.write_text(json.dumps({"points": [point(30, 2.0, 1.0), point(2, 2.0, 1.0)]}))
    assert [entry["prefix"] for entry in read_steps(path)] == [2, 30]
    for text in ("{}", "[]", "{", '{"points": [{}]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=RECORD):
            read_steps(path)
    with pytest.raises(ConfigError, match=r"none\.json"):
        read_steps(tmp_path / "none.json")


def test_the_committed_picture_is_that_of_the_record(tmp_path):
    (tmp_path / RECORD).write_bytes((ROOT / "benchmarks/results" / RECORD).read_bytes())
    assert write_pages(tmp_path, tmp_path / "docs") == [tmp_path / "docs" / STEPS]
    texts = [path.read_text() for path in (tmp_path / "docs" / STEPS, ROOT / "docs/evidence" / STEPS)]
    for label in (
        "143 ms",
        "8.3 ms (17x as fast)",
        "478 ms",
        "12.7 ms (39.7x as fast)",
        "16.3 ms",
        "6.9 ms (2.31x as fast)",
    ):
        assert all(label in text for text in texts), label
