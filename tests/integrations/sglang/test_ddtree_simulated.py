"""Simulated acceptance of DDTREE: real paths of the drawn length, and nothing without SGLang's own variable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.integrations.sglang import processes

from treeverify.errors import ConfigError
from treeverify.integrations.sglang.ddtree import simulated
from treeverify.integrations.sglang.ddtree.simulated import Simulated
from treeverify.ops.tree_build.api import tree_build
from treeverify.ops.tree_build.contract import DraftTrees

DEPTH, WIDTH, BATCH = 7, 17, 6
needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="real SGLang: make test-sglang")


def trees(k: int = WIDTH - 1) -> DraftTrees:
    """Trees of a few kinds: flat (a star), peaked (nearly a chain), between; ``k`` candidates a depth."""
    generator = torch.Generator().manual_seed(k)
    sharp = torch.tensor([0.01, 1.0, 2.0, 3.0, 6.0, 40.0])[:, None, None]
    logits = torch.randn(BATCH, DEPTH, k, generator=generator) * sharp
    log_probs = logits.log_softmax(-1).sort(-1, descending=True).values.float()
    ids = torch.arange(100, 100 + k).expand(BATCH, DEPTH, k).contiguous()
    return tree_build(log_probs, ids, torch.arange(BATCH), budget=WIDTH - 1)


def first_children(parents: list[int], reach: int) -> list[int]:
    """The path, by a loop."""
    path = [0]
    while len(path) <= reach and path[-1] in parents:
        path.append(parents.index(path[-1]))
    return path


@pytest.mark.parametrize("k", [1, 3, WIDTH - 1])
@pytest.mark.parametrize("drawn", range(1, DEPTH + 2))
def test_a_path_of_the_tree_as_long_as_drawn(k: int, drawn: int) -> None:
    drafted = trees(k)
    samples = 1000 + torch.arange(BATCH * WIDTH).view(BATCH, WIDTH)
    accepted = Simulated(4.5, lambda most: min(drawn, most)).accept(drafted, samples, DEPTH)
    assert accepted.path.shape == (BATCH, DEPTH + 1)
    assert accepted.path.dtype == torch.int32
    moved = 0
    for i in range(BATCH):
        path = first_children(drafted.parents[i].tolist(), drawn - 1)
        tokens = [*drafted.tokens[i, path[1:]].tolist(), int(samples[i, path[-1]])]
        assert accepted.path[i].tolist() == path + [-1] * (DEPTH + 1 - len(path))
        assert accepted.lengths[i] == len(path)
        assert accepted.new_tokens[i].tolist() == tokens + [-1] * (WIDTH - len(path))
        assert accepted.bonus[i] == tokens[-1]
        moved += path != list(range(len(path)))
    deepest = drafted.depths.amax(1).clamp(max=drawn - 1)
    assert accepted.lengths.tolist() == (deepest + 1).tolist()
    assert moved or k == 1 or drawn < 3  # rows must move, or a benchmark measures no commit


def test_what_the_target_agrees_with_plays_no_part() -> None:
    """Its samples are tokens of children everywhere, and still the path ends as drawn."""
    drafted = trees()
    every = torch.full((BATCH, WIDTH), 100)  # the likeliest candidate of each depth
    accepted = Simulated(2.0, lambda _: 2).accept(drafted, every, DEPTH)
    assert accepted.lengths.tolist() == [2] * BATCH
    assert accepted.bonus.tolist() == [100] * BATCH


def sglang(monkeypatch: pytest.MonkeyPatch, old: bool = False, **values: Any) -> None:
    """Stands in for SGLang's module with its constants and its draw."""

    def draw(simulate_acc_len: float, simulate_acc_method: str, max_len: int) -> int:
        return min(int(simulate_acc_len), max_len) if simulate_acc_method == "match-expected" else 1

    utils = ModuleType("spec_utils")
    constants = {"LEN": -1.0, "METHOD": "match-expected", "TOKEN_MODE": "fixed"} | values
    for name, value in constants.items():
        setattr(utils, f"SIMULATE_ACC_{name}", value)
    setattr(utils, "_sample_simulated_acc_len" if old else "sample_simulated_acc_len", draw)
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.spec_utils", utils)


@pytest.mark.parametrize("length", [-1.0, 0.0, float("nan")])
def test_off_without_a_length(monkeypatch: pytest.MonkeyPatch, length: float) -> None:
    sglang(monkeypatch, LEN=length, METHOD="odd")
    assert simulated.settings() is None


@pytest.mark.parametrize("old", [False, True])
def test_a_length_warns_and_draws_by_the_method(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, old: bool
) -> None:
    sglang(monkeypatch, old, LEN=6.0, TOKEN_MODE="real-draft-token")
    found = simulated.settings()
    assert found is not None
    assert (found.length, found.draw(8), found.draw(3)) == (6.0, 6, 3)
    assert "SIMULATED ACCEPTANCE of 6 tokens a step" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"METHOD": "odd"}, "SGLANG_SIMULATE_ACC_METHOD: expected one of match-expected, multinomial; got 'odd'"),
        ({"TOKEN_MODE": "fixed"}, "SGLANG_SIMULATE_ACC_TOKEN_MODE: expected real-draft-token .* got 'fixed'"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    sglang(monkeypatch, **({"LEN": 4.0, "TOKEN_MODE": "real-draft-token"} | values))
    with pytest.raises(ConfigError, match=message):
        simulated.settings()


def test_widths_by_cost_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang(monkeypatch, LEN=4.0, TOKEN_MODE="real-draft-token")
    monkeypatch.setenv("KDTREE_BUDGET", "auto")
    with pytest.raises(ConfigError, match="SGLANG_SIMULATE_ACC_LEN: expected to be unset with KDTREE_BUDGET=auto"):
        simulated.settings()


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs a server of SGLang with simulated acceptance in a process of its own."""
    from tests.integrations.sglang import ddtree_pair, ddtree_simulated

    folder = tmp_path_factory.mktemp("pair")
    ddtree_pair.write(folder)

    def run(length: float, **environment: str) -> dict[str, Any]:
        mode = {"SGLANG_SIMULATE_ACC_LEN": str(length), "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
        done = processes.run(ddtree_simulated.__file__, folder, KDTREE_VERIFY="on", **mode, **environment)
        assert "SIMULATED ACCEPTANCE" in done.stderr + done.stdout
        return processes.said(done)

    return run


@needs_sglang
@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.5.23", "0.5.17"])
def test_a_server_commits_what_is_drawn(play: Callable[..., dict[str, Any]], version: str) -> None:
    """Two texts at once: lengths of 2 and 3 only, rows moved, no slot lost."""
    found = play(2.6, **({} if version == "0.5.23" else {"PYTHONPATH": str(processes.OLDEST)}))
    assert found["version"] == version
    assert found["report"]["simulated_acceptance"] == 2.6
    assert set(found["report"]["acceptance_lengths"]) == {"2", "3"}
    assert found["slots"][0] == found["slots"][1]
    assert found["moved"] > 0
