"""Costs of real steps on the toy, and the cache: what is found again, what is measured anew."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.toy.models import ToyDrafter, ToyTarget

from treeverify.bench.step_costs import Grid, load_or_measure, measure
from treeverify.costs import CostCache, CostTable
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError

TOY = Grid(widths=(1, 2, 5), batches=(1, 2), contexts=(8, 16, 90), rounds=1)


def test_every_point_is_measured_through_real_steps():
    told = []
    target = ToyTarget()
    found = measure(target, ToyDrafter(), VerifyMode.OFF, TOY, told.append)
    assert (found.widths, found.batches, found.contexts) == ((1, 2, 5), (1, 2), (8, 16))  # 90 leaves no room
    assert found.verify.shape == (3, 2, 2)
    assert (found.verify > 0).all()
    assert (found.draft > 0).all()
    assert len(told) == 4 < TOY.points()
    verified = target.forwards
    for batch in (1, 2):
        for width in TOY.widths:
            assert verified.count(batch * width) >= 4, f"{batch} x {width} nodes: two rounds at two contexts"


def test_a_model_without_room_is_refused():
    with pytest.raises(ConfigError, match=r"no context of \[90\] leaves 43 of the model's 96 tokens"):
        measure(ToyTarget(), ToyDrafter(), VerifyMode.OFF, Grid(widths=(1, 2, 5), contexts=(90,), rounds=1))


def table(value: float = 1.0) -> CostTable:
    return CostTable((1, 2), (1,), (1,), np.full((2, 1, 1), value), np.ones((1, 1)))


class Measured:
    """Counts its measurements."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> CostTable:
        self.times += 1
        return table(float(self.times))


def test_a_table_is_measured_once_for_each_machine_and_model(tmp_path):
    measured = Measured()
    here, there = ({"cpu": "a", "weights": name, "gpu": None} for name in ("x", "y"))
    for key, value in ((here, 1.0), (here, 1.0), (there, 2.0), (here, 1.0)):
        found = load_or_measure(CostCache(key, tmp_path / "costs"), measured)
        assert found.plain_ms(1, 1) == value
    assert measured.times == 2
    assert len(list((tmp_path / "costs").iterdir())) == 2, "no scratch is left"


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"key": 1}', "cut", "nan", "ragged", "another key", "binary"]
)
def test_what_cannot_be_used_is_measured_anew(tmp_path, damage):
    measured, cache = Measured(), CostCache({"cpu": "a"}, tmp_path)
    load_or_measure(cache, measured)
    whole = cache.path.read_text()
    content = json.loads(whole)
    changed = {
        "cut": whole[: len(whole) // 2],
        "nan": json.dumps({**content, "costs": {**content["costs"], "verify": [[[float("nan")]], [[1.0]]]}}),
        "ragged": json.dumps({**content, "costs": {**content["costs"], "verify": [[[1.0]], [1.0]]}}),
        "another key": json.dumps({**content, "key": {"cpu": "b"}}),
    }
    if damage == "binary":
        cache.path.write_bytes(b"\xff\xfe\x00")
    else:
        cache.path.write_text(changed.get(damage, damage))
    assert load_or_measure(cache, measured).plain_ms(1, 1) == 2.0
    assert load_or_measure(cache, measured).plain_ms(1, 1) == 2.0
    assert measured.times == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/costs: measured costs cannot be kept.*TREEVERIFY_CACHE"):
        CostCache({}, tmp_path / "file" / "costs").store(table())
