"""Widths that change every step, on real schedulers of SGLang 0.5.23 and 0.5.17: greedy texts are plain decoding's.

Each scenario is a process of its own (SGLang keeps globals); two at a time.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
pytest.importorskip("sglang", reason="real SGLang: make test-sglang")

from tests.integrations.sglang import ddtree_auto_scenarios, ddtree_pair, ddtree_scenarios  # noqa: E402
from tests.integrations.sglang.processes import OLDEST, outcome  # noqa: E402

NEW, PROMPTS = ddtree_scenarios.NEW, ddtree_scenarios.PROMPTS
MODES = {"ahead": "validate", "oldest": "on"}
HEADS = ddtree_pair.TARGET["num_attention_heads"]


def play(name: str, folder: Path) -> dict[str, Any]:
    environment = {"KDTREE_VERIFY": MODES.get(name, "off"), "TREEVERIFY_CACHE": str(folder / "cache")}
    if name == "plain":
        return outcome(ddtree_scenarios.__file__, name, folder, **environment)
    if name == "oldest":
        environment["PYTHONPATH"] = str(OLDEST)
    return outcome(ddtree_auto_scenarios.__file__, name, folder, KDTREE_BUDGET="auto", **environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pair")
    ddtree_pair.write(found)
    return found


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Future[dict[str, Any]]]:
    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(play, name, folder) for name in ("plain", *ddtree_auto_scenarios.SCENARIOS)}


@pytest.fixture
def plain(outcomes: dict[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return outcomes["plain"].result()


@pytest.fixture
def planted(outcomes: dict[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return outcomes["planted"].result()


def test_texts_are_plain_decodings_while_widths_change(plain: dict[str, Any], planted: dict[str, Any]) -> None:
    assert planted["together"] == plain["texts"]
    assert planted["alone"] == plain["texts"][:1]
    assert planted["mixed"][0] == plain["texts"][0]
    assert len(planted["mixed"][1]) == NEW


def test_plain_steps_draw_what_a_tree_draws(planted: dict[str, Any]) -> None:
    """With one seed, at temperature 1: numbers belong to positions. The first token is SGLang's own draw."""
    runs, trees = (
        {(place, text[0]): text for turn in turns for place, text in enumerate(turn)} for turns in planted["drawn"]
    )
    both = runs.keys() & trees.keys()
    assert len(both) >= 2, "nothing was compared"
    assert {key: runs[key] for key in both} == {key: trees[key] for key in both}
    assert all(len(text) == NEW for text in runs.values())


def test_every_width_was_served_and_counted(planted: dict[str, Any]) -> None:
    """Or nothing above was a test: every width of the ladder, and trees that were accepted."""
    report = planted["report"]
    widths = {int(width): steps for width, steps in report["auto"]["widths"].items()}
    assert list(widths) == report["auto"]["ladder"] == sorted(set(ddtree_auto_scenarios.SCHEDULE))
    assert min(widths.values()) > 5
    assert sum(widths.values()) == report["steps"]
    assert 0 < report["plain_request_steps"] < report["request_steps"]
    assert report["request_steps"] < report["nodes"] < report["request_steps"] * report["width"]
    assert report["acceptance_length"] > 1.2
    assert report["auto"]["unmatched"] == 0


def test_the_drafters_rows_are_written_without_a_draft_too(planted: dict[str, Any]) -> None:
    """Each committed position once, the prompt's first: no step leaves a gap that a later draft would attend to."""
    known = len(PROMPTS[0]) + NEW - 1  # the last token has no row yet
    assert planted["rows"][:known] == list(range(known))


def test_prefix_hits_ends_aborts_and_retraction(plain: dict[str, Any], planted: dict[str, Any]) -> None:
    text = plain["texts"][2]
    assert planted["cached"] > len(PROMPTS[2]) // 2
    assert planted["longer"] == plain["longer"]
    assert planted["short"] == [text[:1], text[:2], text[:4]]
    assert planted["aborted"] == plain["texts"][0]
    assert planted["retracted"]["count"] > 0
    assert planted["retracted"]["texts"] == plain["texts"]
    assert planted["slots"][0] == planted["slots"][1]


@pytest.mark.parametrize(("name", "version"), [("ahead", "0.5.23"), ("oldest", "0.5.17")])
def test_planted_and_chosen_widths_on_our_backend(
    plain: dict[str, Any], outcomes: dict[str, Future[dict[str, Any]]], name: str, version: str
) -> None:
    found = outcomes[name].result()
    assert found["version"] == version
    assert found["together"][:3] == plain["texts"]
    assert len(found["together"][3]) == NEW
    assert found["chosen"] == plain["texts"]
    assert found["slots"][0] == found["slots"][1]
    assert found["report"]["auto"]["unmatched"] == 0
    assert all(found["planted"]["auto"]["widths"].values())


@pytest.mark.parametrize("name", sorted(MODES))
def test_counters_are_exported(outcomes: dict[str, Future[dict[str, Any]]], name: str) -> None:
    found = outcomes[name].result()
    assert 0 < found["exported"]["treeverify_ddtree_steps_total"] <= found["report"]["steps"]
    assert found["exported"]["treeverify_ddtree_gain"] > 0


@pytest.mark.parametrize("name", sorted(MODES))
def test_steps_that_measure_costs_are_not_counted(outcomes: dict[str, Future[dict[str, Any]]], name: str) -> None:
    found = outcomes[name].result()
    served = {mode: rows for mode, rows in found["counts"].items() if rows}
    assert served == {MODES[name]: found["report"]["nodes"] * HEADS}


def test_costs_are_kept(outcomes: dict[str, Future[dict[str, Any]]], folder: Path) -> None:
    """One file for each mode and version; a second server of the same kind reads it."""
    for running in outcomes.values():
        running.result()
    assert len(list((folder / "cache" / "costs").glob("*.json"))) == len(ddtree_auto_scenarios.SCENARIOS)
