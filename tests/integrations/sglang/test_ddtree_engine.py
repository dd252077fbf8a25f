"""DDTREE on a real scheduler of SGLang 0.5.23: real worker, runners, pools and Triton kernels, in the interpreter.

Each scenario is a process of its own (SGLang keeps globals); two at a time. Greedy texts must be plain decoding's.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
pytest.importorskip("sglang", reason="real SGLang: make test-sglang")

from tests.integrations.sglang import ddtree_pair, ddtree_scenarios  # noqa: E402
from tests.integrations.sglang.processes import OLDEST, outcome  # noqa: E402

NEW, WIDTH = ddtree_scenarios.NEW, ddtree_scenarios.WIDTH


def play(name: str, folder: Path) -> dict[str, Any]:
    environment = {"KDTREE_VERIFY": "on" if name in ("sampled", "oldest", "ahead") else "off"}
    if name == "oldest":
        environment["PYTHONPATH"] = str(OLDEST)
    return outcome(ddtree_scenarios.__file__, name, folder, **environment)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("pair")
    ddtree_pair.write(folder)
    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(play, name, folder) for name in ddtree_scenarios.SCENARIOS}


@pytest.fixture
def plain(outcomes: dict[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return outcomes["plain"].result()


@pytest.fixture
def served(outcomes: dict[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return outcomes["served"].result()


@pytest.fixture
def sampled(outcomes: dict[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return outcomes["sampled"].result()


@pytest.fixture
def broken(outcomes: dict[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return outcomes["broken"].result()


def test_greedy_texts_are_those_of_plain_decoding(plain: dict[str, Any], served: dict[str, Any]) -> None:
    assert [len(text) for text in plain["texts"]] == [NEW] * 3
    assert served["together"] == plain["texts"]
    assert served["alone"] == plain["texts"][:2]
    assert all(0 <= token < ddtree_pair.VOCAB for text in served["together"] for token in text)


def test_the_oldest_version_gives_the_same_texts(
    plain: dict[str, Any], outcomes: dict[str, Future[dict[str, Any]]]
) -> None:
    assert outcomes["oldest"].result() == {"version": "0.5.17", "together": plain["texts"]}


def test_overlap_scheduling(plain: dict[str, Any], outcomes: dict[str, Future[dict[str, Any]]]) -> None:
    ahead = outcomes["ahead"].result()
    assert ahead["together"] == plain["texts"]
    assert ahead["drawn"] == NEW
    assert ahead["slots"][0] == ahead["slots"][1]
    check_accounts(ahead["accepted"], given=4 * (NEW - 1))
    steps = sum(ahead["accepted"]["acceptance_lengths"].values())
    assert steps < ahead["accepted"]["request_steps"], "no request ran a step beyond its end: nothing was tested"


def test_the_end_of_a_step_in_buffers_of_larger_batches(
    plain: dict[str, Any], outcomes: dict[str, Future[dict[str, Any]]]
) -> None:
    """As CUDA graphs run it: requests that are missing in the batch leave nothing and take nothing."""
    found = outcomes["replayed"].result()
    assert found["together"] == plain["texts"]
    assert found["alone"] == plain["texts"][1:2]
    assert found["pair"] == plain["texts"][1:]
    assert found["replays"] == [1, 2, 4]
    assert found["counted"][0] == found["counted"][1]
    assert found["slots"][0] == found["slots"][1]


def test_the_end_of_the_context(outcomes: dict[str, Future[dict[str, Any]]]) -> None:
    """No request's slots reach into another's, and none is lost."""
    brim = outcomes["brim"].result()
    assert brim["texts"] == outcomes["brim_plain"].result()["texts"]
    assert [len(text) for text in brim["texts"]] == [
        ddtree_scenarios.CONTEXT - 2 - len(ids) for ids in ddtree_scenarios.PROMPTS
    ]
    assert brim["slots"][0] == brim["slots"][1]


def check_accounts(counted: dict[str, Any], given: int | None = None) -> None:
    """Acceptance counts the tokens that texts hold, prefill's first ones aside, and the steps of live requests."""
    lengths = {int(length): count for length, count in counted["acceptance_lengths"].items()}
    tokens, steps = sum(length * count for length, count in lengths.items()), sum(lengths.values())
    assert (tokens, steps) == (counted["given"], counted["request verify steps"])
    assert counted["acceptance_length"] == tokens / steps
    assert given in (None, tokens)


def test_acceptance_counts_what_was_given_out(served: dict[str, Any]) -> None:
    """Three texts that end at their limit, some inside a path; then all the others, stopped and aborted ones."""
    check_accounts(served["accepted"], given=3 * (NEW - 1))
    check_accounts(served["in all"])


def test_trees_were_accepted(served: dict[str, Any]) -> None:
    """Or nothing above was a test: at least one draft token in most steps, and not only the first child."""
    counted = served["accepted"]
    assert counted["acceptance_length"] > 1.5
    assert counted["nodes"] == counted["request_steps"] * WIDTH
    assert sum(counted["acceptance_lengths"].values()) == counted["request_steps"]
    assert sum(counted["host_seconds"].values()) > 0


def test_a_prefix_hit_and_chunks_change_nothing(plain: dict[str, Any], served: dict[str, Any]) -> None:
    assert served["cached"] > len(ddtree_scenarios.PROMPTS[2]) // 2
    assert served["longer"] == plain["longer"]


def test_ends_inside_a_path(plain: dict[str, Any], served: dict[str, Any]) -> None:
    text = plain["texts"][2]
    assert served["short"] == [text[:1], text[:2], text[:4]]
    assert served["stopped"] == [text[: text.index(served["stop"]) + 1]]


def test_an_abort_and_a_retraction_change_no_other_text(plain: dict[str, Any], served: dict[str, Any]) -> None:
    assert served["aborted"] == plain["texts"][0]
    assert served["retracted"]["count"] > 0
    assert served["retracted"]["texts"] == plain["texts"]


def test_no_slot_is_leaked(served: dict[str, Any]) -> None:
    before, after = served["slots"]
    assert before == after


def test_our_backend_and_mixed_batches(plain: dict[str, Any], sampled: dict[str, Any]) -> None:
    assert sampled["together"] == plain["texts"]
    greedy, drawn = sampled["mixed"]
    assert greedy == plain["texts"][0]
    assert len(drawn) == NEW


def test_a_seed_repeats_its_text_after_the_first_token(sampled: dict[str, Any]) -> None:
    """The first token is drawn by SGLang's own sampler in the prefill, which has no seed."""
    first, again, *others = sampled["drawn"]
    if first[0] == again[0]:
        assert first == again
    assert any(text[1:] != first[1:] for text in others)
    assert len(sampled["filtered"]) == NEW


def test_what_is_not_served_is_refused_by_name(sampled: dict[str, Any]) -> None:
    penalty, grammar = sampled["refused"]
    for reason, name in ((penalty, "frequency_penalty"), (grammar, "regex")):
        assert reason["type"] == "abort"
        assert f"DDTREE does not serve: {name}" in reason["message"]


def test_the_report_counts(sampled: dict[str, Any]) -> None:
    report = sampled["report"]
    assert (report["width"], report["block"]) == (WIDTH, ddtree_pair.BLOCK)
    assert report["steps"] > 0
    assert report["acceptance_length"] > 1


def test_a_dropped_mask_and_rows_left_in_place_are_seen(plain: dict[str, Any], broken: dict[str, Any]) -> None:
    assert broken["mask"] != plain["texts"]
    assert broken["move"] != plain["texts"]
    assert broken["whole"] == plain["texts"][:1]
