"""DDTREE with a window of the draft, on real schedulers of SGLang 0.5.23 and 0.5.17, in the interpreter.

What is drafted must be what DFLASH's own step drafts with that window, and texts plain decoding's.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
pytest.importorskip("sglang", reason="real SGLang: make test-sglang")

from tests.integrations.sglang import ddtree_pair, ddtree_window_scenarios  # noqa: E402
from tests.integrations.sglang.processes import OLDEST, outcome  # noqa: E402

PLAYS = ("plain", "chain", "whole", "windowed", "windowed-oldest", "kernel")
WINDOWED = ("windowed", "windowed-oldest", "kernel")


def play(name: str, folder: Path) -> dict[str, Any]:
    scenario, *version = name.split("-")
    environment = {"KDTREE_VERIFY": "on" if name == "kernel" else "off"}
    if version:
        environment["PYTHONPATH"] = str(OLDEST)
    return outcome(ddtree_window_scenarios.__file__, scenario, folder, **environment)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("pair")
    ddtree_pair.write(folder)
    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(play, name, folder) for name in PLAYS}


def shared(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[list[bool], list[bool]]:
    """Whether the drafts at places that both came by are equal: at prefixes within the window, and beyond it."""
    found: tuple[list[bool], list[bool]] = [], []
    for place in ours["drafts"].keys() & theirs["drafts"].keys():
        beyond = int(place.split()[-1]) > ddtree_window_scenarios.WINDOW
        found[beyond].append(ours["drafts"][place] == theirs["drafts"][place])
    return found


@pytest.mark.parametrize("name", ["chain", "whole", *WINDOWED])
def test_texts_are_those_of_plain_decoding(name: str, outcomes: dict[str, Future[dict[str, Any]]]) -> None:
    assert outcomes[name].result()["together"] == outcomes["plain"].result()["texts"]


@pytest.mark.parametrize("name", WINDOWED)
def test_drafts_are_those_of_dflash_with_that_window(name: str, outcomes: dict[str, Future[dict[str, Any]]]) -> None:
    within, beyond = shared(outcomes[name].result(), outcomes["chain"].result())
    assert len(within) > 1
    assert len(beyond) > 12
    assert all(within)
    assert all(beyond)


def test_the_window_changes_what_is_drafted_beyond_it(outcomes: dict[str, Future[dict[str, Any]]]) -> None:
    """Or nothing above was a test."""
    within, beyond = shared(outcomes["whole"].result(), outcomes["windowed"].result())
    assert all(within)
    assert beyond.count(False) > len(beyond) // 2


@pytest.mark.parametrize("name", ["windowed", "windowed-oldest"])
def test_prefix_hits_short_texts_aborts_and_retraction(name: str, outcomes: dict[str, Future[dict[str, Any]]]) -> None:
    plain, windowed = outcomes["plain"].result(), outcomes[name].result()
    assert windowed["version"] == ("0.5.17" if "oldest" in name else "0.5.23")
    assert windowed["cached"] > ddtree_window_scenarios.WINDOW
    assert windowed["longer"] == plain["longer"]
    assert windowed["short"] == [plain["texts"][2][:tokens] for tokens in (1, 2, 4)]
    assert windowed["aborted"] == plain["texts"][0]
    assert windowed["retracted"]["count"] > 0
    assert windowed["retracted"]["texts"] == plain["texts"]
    assert windowed["accepted"]["acceptance_length"] > 1.3
    assert max(windowed["lengths"]) == ddtree_window_scenarios.WINDOW


@pytest.mark.parametrize("name", ["windowed", "windowed-oldest"])
def test_the_drafter_s_slot_table_has_room_for_a_window_of_any_size(
    name: str, outcomes: dict[str, Future[dict[str, Any]]]
) -> None:
    target, drafter = outcomes[name].result()["tables"]
    assert drafter == target


@pytest.mark.parametrize("name", WINDOWED)
def test_no_slot_is_leaked(name: str, outcomes: dict[str, Future[dict[str, Any]]]) -> None:
    before, after = outcomes[name].result()["slots"]
    assert before == after
