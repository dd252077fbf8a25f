"""SGLang's own Engine on a CPU, all its processes, with DDTREE on our backend: what a client gets and can ask.

The target and the drafter are random and small; Triton's kernels are interpreted, ours are their CPU references.
Expected are the texts of the same engine without speculation, on SGLang's own kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
pytest.importorskip("sglang", reason="real SGLang: make test-sglang")

from tests.integrations.sglang import ddtree_pair, live_engine  # noqa: E402
from tests.integrations.sglang.processes import outcome, with_plugin  # noqa: E402

from treeverify.control.schema import PluginState  # noqa: E402

RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
NEAR = 1e-3
"""Log-probability within which two tokens may change places in another batch."""


class Played(NamedTuple):
    tree: dict[str, Any]
    retract: dict[str, Any]
    plain: dict[str, Any]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("live")
    ddtree_pair.write(folder)
    path = with_plugin(folder / "site", "live_plugin")
    run: Callable[..., dict[str, Any]] = partial(
        outcome, live_engine.__file__, PYTHONPATH=path, SGLANG_PLUGINS="treeverify,live_plugin"
    )
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(run, "tree", folder, KDTREE_VERIFY="on")
        retract = pool.submit(run, "retract", folder, KDTREE_VERIFY="on", **RETRACT)
        drawn: Path = folder / "drawn.json"
        drawn.write_text(json.dumps(ours.result()["drawn"]))
        plain = pool.submit(run, "plain", folder, drawn, KDTREE_VERIFY="off")
    return Played(ours.result(), retract.result(), plain.result())


def test_greedy_texts_are_those_of_plain_decoding(played: Played) -> None:
    assert [len(text) for text in played.plain["together"]] == [live_engine.NEW] * 3
    assert played.tree["together"] == played.plain["together"]


def test_a_prefix_hit_changes_nothing(played: Played) -> None:
    assert played.tree["after_a_prefix"]["cached"] > len(live_engine.PROMPTS[2]) // 2
    assert played.tree["after_a_prefix"]["text"] == played.plain["after_a_prefix"]["text"]


@pytest.mark.parametrize("requests", ["cold", "mixed"])
def test_draws_from_a_law_that_leaves_one_token_are_the_greedy_text(played: Played, requests: str) -> None:
    """Sampling requests alone, and one among greedy ones."""
    assert played.tree[requests] == played.plain["together"]


def test_every_drawn_token_is_one_of_those_that_the_law_leaves(played: Played) -> None:
    for text, odds in zip(played.tree["drawn"], played.plain["odds"], strict=True):
        assert [token for _, token, _ in odds["token"]] == text
        for (given, *_), best in zip(odds["token"], odds["best"], strict=True):
            assert given >= best[live_engine.TOP_K - 1][0] - NEAR


def test_a_seed_repeats_its_text_after_the_first_token(played: Played) -> None:
    """The first token is drawn by SGLang's own sampler in the prefill, which has no seed."""
    texts: dict[tuple[int, int], list[list[int]]] = {}
    for seed, text in zip(live_engine.SEEDS, played.tree["drawn"], strict=True):
        texts.setdefault((seed, text[0]), []).append(text)
    assert max(map(len, texts.values())) > 1, "nothing was repeated"
    assert all(text == first for first, *others in texts.values() for text in others)
    assert len({tuple(first) for first, *_ in texts.values()}) == len(texts)


def test_an_abort_in_the_middle_changes_no_other_text(played: Played) -> None:
    reason, length = played.tree["gone"]
    assert reason["type"] == "abort"
    assert 1 < length < live_engine.LONG
    assert played.tree["kept"] == played.plain["together"][0]
    assert played.tree["after_the_abort"] == played.plain["together"]


def test_requests_taken_back_in_a_small_pool_get_the_same_texts(played: Played) -> None:
    assert played.retract["retractions"] > 0
    assert played.retract["together"] == played.plain["together"]


@pytest.mark.parametrize("run", ["tree", "retract"])
def test_the_server_says_that_trees_were_verified_and_accepted_by_ours(played: Played, run: str) -> None:
    """Or nothing above was a test."""
    state = getattr(played, run)["state"]
    assert state["disable_overlap_schedule"] is (run == "retract")
    assert state["ddtree"]["width"] == live_engine.WIDTH
    assert state["ddtree"]["nodes"] == state["ddtree"]["request_steps"] * live_engine.WIDTH > 0
    assert state["ddtree"]["acceptance_length"] > 1.2
    (rank,) = PluginState.model_validate_json(json.dumps(state["treeverify"])).ranks
    backend = rank.backends[0]
    assert rank.mode == "on"
    assert backend.served["on"].calls > 0
    assert backend.left_to_parent == {}
    assert {shape.nodes for shape in backend.shapes} == {live_engine.WIDTH}
