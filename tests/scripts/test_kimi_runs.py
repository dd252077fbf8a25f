"""The live runs at Kimi K2.6's geometry against the stand-in server: what is simulated, ranks, the record."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.scripts.test_live_runs import live, part, record

__all__ = ["live", "part"]  # fixtures


@pytest.fixture
def small(live: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts, with a drafter whose configuration alone is written."""
    trees, ranks = importlib.import_module("kimi_trees"), importlib.import_module("kimi_tp")
    monkeypatch.setattr(live.live_server, "has_fa3", lambda: True)
    monkeypatch.setattr(trees, "has_fa3", lambda: True)
    monkeypatch.setattr(trees, "BATCHES", (1, 2))
    monkeypatch.setattr(trees.live_models, "save_file", lambda *_, **__: None)
    matrices = []
    monkeypatch.setattr(trees.live_models.Weights, "matrix", lambda _, name, *shape: matrices.append((name, *shape)))
    return SimpleNamespace(trees=trees, ranks=ranks, matrices=matrices, run=live.live_part.run)


def test_every_side_accepts_what_is_simulated(small: SimpleNamespace, part: Any) -> None:
    options = SimpleNamespace(sides=",".join(small.trees.DEFAULT), layers=7, prefixes="64,96", windows=5, gap=False)
    part.seconds = 120
    assert not small.run(part, lambda part: small.trees.measure(part, options)), part.failures
    found = record(part)["found"]
    assert [(point["prefix"], point["batch"]) for point in found["points"]] == [(64, 1), (64, 2), (96, 1), (96, 2)]
    point = found["points"][0]
    assert set(point["sides"]) == set(small.trees.DEFAULT)
    assert set(point["tokens_per_second_over"]["dflash-fa3"]) == {"plain", "dflash-on", "ddtree17"}
    assert set(point["step_ms_over"]) == {"plain", "dflash-on", "dflash-fa3"}
    assert point["sides"]["ddtree17"]["tokens_per_step"] == pytest.approx(5.5, rel=0.1)
    forced = point["derived_tokens_per_second_forced_argmax"]
    assert forced["ddtree17"] < point["derived_tokens_per_second_free_running"]["ddtree17"]
    assert forced["plain"] == pytest.approx(1e3 / point["sides"]["plain"]["step_ms"])
    assert point["sides"]["plain"]["tokens_per_step"] == 1
    assert found["simulated_acceptance"] == small.trees.lengths()
    for name, profile in found["profiles"].items():
        assert profile["steps"] == 6
        assert profile["us_by_graph"]["target"] == 8  # seven layers of attention and one kernel of the experts
        assert profile["us_by_graph"]["between"] >= 100
        assert ("draft" in profile["us_by_graph"]) == (name != "plain")


def test_points_without_time_are_told_and_profiles_are_left(small: SimpleNamespace, part: Any) -> None:
    options = SimpleNamespace(sides="plain,ddtree17", layers=7, prefixes="64", windows=5, gap=False)
    part.seconds = small.trees.RESERVE - 1
    small.run(part, lambda part: small.trees.measure(part, options))
    assert part.failures == [f"not reached for want of time: prefix 64, batch {batch}" for batch in (1, 2)]
    assert set(record(part)["found"]["profiles"]) == {"plain", "ddtree17"}


def test_the_drafter_is_a_rank_s_share_of_the_published_ones(small: SimpleNamespace, tmp_path: Path) -> None:
    told = small.trees.drafter(tmp_path / "drafter", 7, 4096)
    assert told == {"layers": 6, "features": (0, 1, 2, 3, 4, 5), "block": 8}
    shapes = {name: shape[:2] for name, *shape in small.matrices}
    assert shapes["fc"] == [7168, 6 * 7168]
    assert shapes["layers.5.self_attn.q_proj"] == [8 * 128, 7168]
    assert shapes["layers.5.self_attn.k_proj"] == [128, 7168]
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    assert config["vocab_size"] == small.trees.geometry(7, 4096)["vocab_size"]
    whole = small.trees.drafter(tmp_path / "whole", 25, 4096, 1)
    assert whole["features"] == (0, 4, 8, 12, 16, 20)
    assert small.trees.geometry(25, 4096, 1)["num_attention_heads"] == 64


def test_what_is_simulated_is_the_committed_record_s(small: SimpleNamespace) -> None:
    chain, tree = (small.trees.simulated(mode) for mode in ("dflash-fa3", "ddtree17"))
    assert chain["SGLANG_SIMULATE_ACC_LEN"] == str(small.trees.lengths()["dflash"])
    assert float(tree["SGLANG_SIMULATE_ACC_LEN"]) > float(chain["SGLANG_SIMULATE_ACC_LEN"])
    assert tree["SGLANG_SIMULATE_ACC_TOKEN_MODE"] == "real-draft-token"
    for mode in ("plain", "ngram"):
        assert small.trees.simulated(mode) == {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}


def test_a_side_that_accepts_less_is_told(small: SimpleNamespace) -> None:
    sides = {
        "ddtree17": {"fewest_steps": 11, "tokens_per_step": 4.0},
        "plain": {"fewest_steps": 12, "tokens_per_step": 1},
    }
    steps, accepted = small.trees.short("2k", sides)
    assert "2k ddtree17: windows of 11 steps" in steps
    assert "4.00 tokens a step, simulated 5.50" in accepted


def test_plans_name_sides_that_exist(small: SimpleNamespace) -> None:
    named = []
    for plan in Path(small.trees.__file__).parent.glob("*.plan"):
        for line in plan.read_text().splitlines():
            words = line.split()
            if "LIVE=kimi_trees.py" in words:
                named += words[words.index("--sides") + 1].split(",") if "--sides" in words else small.trees.DEFAULT
            if "LIVE=kimi_tp.py" in words:
                assert len(words[2].split(",")) == int(words[words.index("--tp") + 1])
    assert [name for name in named if not small.trees.is_side(name)] == []


def test_sides_whose_drafter_has_a_window(small: SimpleNamespace, part: Any) -> None:
    sides = ["plain", "dflash-on-win64", "ddtree17", "ddtree17-win64"]
    options = SimpleNamespace(sides=",".join(sides), layers=7, prefixes="96", windows=5, gap=False)
    part.seconds = 120
    assert not small.run(part, lambda part: small.trees.measure(part, options)), part.failures
    found = record(part)["found"]
    for name in sides:
        window = "--speculative-draft-window-size 64" in " ".join(found["flags"][name])
        assert window == name.endswith("win64")
    assert set(found["ddtree"]) == {"ddtree17", "ddtree17-win64"}
    point = found["points"][0]
    assert set(point["step_ms_over"]) == {"plain", "dflash-on-win64"}
    with_window, without = (point["sides"][name]["tokens_per_step"] for name in ("ddtree17-win64", "ddtree17"))
    assert with_window == pytest.approx(without, rel=0.1)


def test_names_of_sides(small: SimpleNamespace) -> None:
    for name in ("plain", "dflash-fa3", "dflash-on-win2048", "ddtree65-win8"):
        assert small.trees.is_side(name)
    for name in ("plain-win64", "ddtree17-win", "ddtree17-win64x", "ddtree18", "dflash", "win64"):
        assert not small.trees.is_side(name)


def test_two_ranks(small: SimpleNamespace, part: Any) -> None:
    options = SimpleNamespace(tp=2, layers=7, algorithms="ngram,ddtree17", prefixes="64,96", windows=5, gap=False)
    assert not small.run(part, lambda part: small.ranks.measure(part, options)), part.failures
    found = record(part)["found"]
    for algorithm in small.ranks.ALGORITHMS:
        one = found[algorithm]
        assert [point["prefix"] for point in one["points"]] == [64, 96]
        assert one["points"][0]["on"]["profile"]["steps"] == one["points"][0]["off"]["profile"]["steps"] == 6
        assert [{*landed} for landed in one["switched_at"]] == [{"0", "1"}] * 4
        assert {row["rank"] for row in one["ranks"]} == {0, 1}


def test_ranks_that_do_not_agree_are_told(small: SimpleNamespace) -> None:
    good = {
        "backend": "target",
        "served": {"on": {"calls": 3}},
        "left_to_parent": {},
        "rows": 9,
        "mismatched_rows": 0,
        "max_row_ulp": 1.0,
        "within_1_ulp": 1.0,
        "breaches": 0,
        "layers": 7,
    }
    ranks = [good | {"rank": 0}, good | {"rank": 1}]
    assert small.ranks.disagreements(ranks, 2) == []
    assert small.ranks.disagreements(ranks, 4) == ["ranks [0, 1], expected 4"]
    assert small.ranks.disagreements([ranks[0], ranks[1] | {"rows": 8}], 2) == ["rows differ between ranks: [9, 8]"]
    (beyond,) = small.ranks.disagreements([ranks[0], ranks[1] | {"max_row_ulp": 3.0}], 2)
    assert "beyond 2 ULP" in beyond
