"""Replay must not hide anything: an engine over it gives what the engine gives, right or wrong."""

from __future__ import annotations

import pytest
import torch

from treeverify.engine.engine import Engine, EngineConfig
from treeverify.errors import ParityError
from treeverify.models.pair import load_pair
from treeverify.parity.engine_law import CASES, draw
from treeverify.parity.replay import Replay
from treeverify.step import step

pytestmark = pytest.mark.slow
DRAWS = 24
CASE = CASES[0]


@pytest.fixture(scope="module")
def pair():
    target, drafter, _ = load_pair()
    return target, drafter


def engines(pair) -> tuple[Engine, Engine]:
    real = Engine(*pair, config=EngineConfig(slots=2048, max_batch=16, verify="on"))
    return real, Replay(*pair).engine(2048, 16)


def test_replay_gives_the_engines_tokens_and_repeats_little(pair):
    real, replayed = engines(pair)
    assert draw(real, CASE, 5, DRAWS) == draw(replayed, CASE, 5, DRAWS)
    target = replayed.target
    assert target.computed + target.looked_up == DRAWS + real.metrics.request_steps
    assert target.looked_up > DRAWS / 2
    before = target.computed
    assert draw(replayed, CASE, 5, DRAWS) == draw(real, CASE, 5, DRAWS)
    assert target.computed == before
    assert real.metrics.moved_rows == replayed.metrics.moved_rows > 0


def test_rows_lost_at_commit_are_not_hidden_by_replay(pair, monkeypatch):
    """A commit that leaves accepted rows where the tree had them: the prefix then holds rows of other branches."""
    right = draw(engines(pair)[0], CASE, 5, DRAWS)
    real, replayed = engines(pair)
    draw(replayed, CASE, 5, DRAWS)  # what is remembered is right; the fault comes later
    monkeypatch.setattr(step, "kv_compact", lambda *_: None)
    wrong = draw(real, CASE, 5, DRAWS)
    assert wrong == draw(replayed, CASE, 5, DRAWS)
    assert wrong != right


def test_replay_refuses_what_it_cannot_look_up(pair):
    replay = Replay(*pair)
    off = Engine(replay.target, replay.drafter, config=EngineConfig(slots=512, verify="off"))
    with pytest.raises(ParityError, match="verify mode on"):
        draw(off, CASE, 5, 1)
    chunked = EngineConfig(slots=512, verify="on", prefill_chunk=4)
    engine = Engine(replay.target, replay.drafter, config=chunked, mine=replay.target.implementation)
    with pytest.raises(ParityError, match="one piece"):
        draw(engine, CASE, 5, 1)
    with pytest.raises(ParityError, match="writes its rows"):
        replay.target.forward(torch.zeros(1).long(), torch.zeros(1).long(), [], lambda *a: a[1])
