"""The report: complete, self-contained, escaped, and never half there."""

from __future__ import annotations

import json
import re

import pytest
from tests.cutover.synthetic import layer, sample, state
from tests.cutover.test_gates import parted_all

from treeverify.cutover import gates, report
from treeverify.cutover.evidence import Evidence
from treeverify.cutover.limits import Limits
from treeverify.cutover.sample_gates import generation
from treeverify.cutover.samples import Sample
from treeverify.errors import ConfigError

HOSTILE = "<script>alert(1)</script>&"
EVENTS = [
    {"at": "2026-01-01T00:00:00Z", "event": "switched", "stage": "validate", "detail": HOSTILE},
    {"at": 0, "event": "judged"},
]


@pytest.fixture(scope="module")
def content():
    """(verdicts, samples, states) of a run whose candidate is wrong in every way."""
    baseline = sample(0, 0.036, noise_seed=1)
    candidate = sample(0, 0.3, noise_seed=2, accepted=[5, 4, 1]).model_copy(update={"mode": "on"})
    layers = [layer(0, 20_000), layer(1, 20_000, beyond=2_500, max_row_ulp=3.5, mismatched_rows=4)]
    states = {"before": [state("off")], "validate": [state(calls={"validate": 9}, layers=layers)]}
    verdicts = gates.judge("validate", baseline, baseline, [state()], states["validate"], Limits())
    verdicts += gates.judge("on", baseline, candidate, [state("on")], [state("on", calls={"on": 3})], Limits())
    return verdicts, {"baseline": baseline, "on": candidate}, states


def test_the_page_shows_everything_and_fetches_nothing(tmp_path, content):
    path = report.write(tmp_path / "parity-report.html", EVENTS, *content)
    page = path.read_text()
    verdicts = content[0]
    assert "Stopped at a gate" in page
    for verdict in verdicts:
        assert f"<td>{verdict.stage}</td><td>{verdict.gate}</td>" in page
    assert page.count('<span class="no">closed</span>') == sum(not verdict.passed for verdict in verdicts) >= 4
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings[:5] == [
        "Gates",
        "What was done",
        "Ours against the baseline, layer by layer",
        "Worst rows",
        "Acceptance lengths",
    ]
    assert headings[5:] == [
        "Teacher-forced text: on against baseline",
        "Where the two laws differ most",
        "Speed",
        "Samples and servers",
    ]
    assert page.count('<svg class="tree"') == 3
    assert "1970-01-01T00:00:00+00:00" in page
    assert HOSTILE not in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    links = re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", page)
    assert [link for link in links if not link.startswith("data:image/png;base64,")] == []
    assert "@import" not in page
    assert len(page) < 2_000_000


def test_the_json_holds_the_same_and_can_be_read_back(tmp_path, content):
    verdicts, samples, states = content
    found = json.loads(report.write(tmp_path / "r.html", EVENTS, *content).with_suffix(".json").read_text())
    assert found["verdict"]["passed"] is False
    assert [gates.Verdict.model_validate(entry) for entry in found["verdicts"]] == verdicts
    assert {name: Sample.model_validate(entry) for name, entry in found["samples"].items()} == samples
    assert found["states"]["validate"][0]["ranks"][0]["backends"][0]["layers"][1]["mismatched_rows"] == 4
    assert len(states) == len(found["states"])
    assert found["events"] == EVENTS


def test_each_text_that_parts_is_shown_with_its_place_and_gap(tmp_path):
    baseline, candidate = parted_all()
    verdict = generation("validate", baseline, candidate, Limits())
    path = report.write(tmp_path / "r.html", [], [verdict], {}, {})
    found = json.loads(path.with_suffix(".json").read_text())["verdicts"][0]["texts"]
    assert [(text["prompt"], text["place"], text["judged"]) for text in found] == [
        ("p0", 3, "near-tie"),
        ("p1", 5, "fault"),
        ("p2", 0, "prefill"),
        ("p3", None, "fault"),
    ]
    assert [text["gap"] for text in found] == [pytest.approx(0.1), pytest.approx(0.7), pytest.approx(0.4), None]
    rows = re.findall(
        r'<tr><td>(p\d)</td><td class="n">(.*?)</td><td class="n">(.*?)</td><td>(.*?)</td>', path.read_text()
    )
    assert rows == [
        ("p0", "3", "0.1", "near-tie"),
        ("p1", "5", "0.7", "fault"),
        ("p2", "0", "0.4", "prefill"),
        ("p3", "–", "–", "fault"),
    ]


def test_a_run_that_stopped_early_has_a_page_without_figures(tmp_path):
    page = report.write(tmp_path / "r.html", EVENTS[1:], [], {}, {}).read_text()
    assert "nothing was judged" in page
    assert "<svg" not in page


def test_open_gates_are_said_so(tmp_path, content):
    opened = [verdict for verdict in content[0] if verdict.passed]
    page = report.write(tmp_path / "r.html", [], opened, {}, {}).read_text()
    assert "Every gate is open" in page
    assert "in the stages validate, on" in page


def test_nothing_is_half_written(tmp_path, content):
    path = tmp_path / "r.html"
    path.write_text("old")
    (tmp_path / "r.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        report.write(path, EVENTS, *content)
    assert path.read_text() == "old"
    with pytest.raises(ConfigError, match="nowhere"):
        report.write(tmp_path / "nowhere" / "r.html", [], [], {}, {})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.html", "r.json"]


def test_the_last_sample_taken_is_the_one_that_is_compared(tmp_path, content):
    """Names do not sort as stages do."""
    evidence = Evidence(tmp_path)
    for name in ("baseline", "validate", "on-eager", "validate-graphs", "on"):
        evidence.keep(name, content[1]["baseline"], content[2]["validate"])
    assert list(evidence.samples()) == list(evidence.states())
    assert [*evidence.samples()][-2:] == ["validate-graphs", "on"]
    page = report.write(tmp_path / "r.html", [], content[0], evidence.samples(), evidence.states()).read_text()
    assert "Teacher-forced text: on against baseline" in page


def test_what_was_not_judged_is_neither_open_nor_closed(tmp_path, content):
    opened = [verdict for verdict in content[0] if verdict.passed]
    unknown = opened[0].model_copy(update={"passed": None, "gate": "kl", "stage": "on-eager"})
    path = report.write(tmp_path / "r.html", [], [*opened, unknown], {}, {})
    page, found = path.read_text(), json.loads(path.with_suffix(".json").read_text())
    assert "Every judged gate is open" in page
    assert "Not judged: kl (on-eager)" in page
    assert page.count('<span class="unknown">not judged</span>') == 1
    assert page.count('<span class="yes">open</span>') == len(opened)
    assert found["verdict"]["not_judged"] == ["kl (on-eager)"]
    assert found["verdicts"][-1]["passed"] is None
    alone = json.loads(report.write(tmp_path / "a.html", [], [unknown], {}, {}).with_suffix(".json").read_text())
    assert (alone["verdict"]["passed"], alone["verdict"]["why"]) == (False, "nothing was judged")
