from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from treeverify.bench.ceilings import Rates
from treeverify.bench.workloads import (
    COLD_BYTES,
    PAGE,
    SCALE,
    Point,
    load_points,
    make_pool,
    make_workload,
    parse_point,
    pool_slots,
    random_visibility,
    set_count,
)
from treeverify.errors import ConfigError

ANCHORS = Path(__file__).resolve().parents[2] / "benchmarks/anchors/h200-anchors.csv"
ANCHOR_RATES = Rates(copy=4.26628e12, matmul=808.69e12)
CPU = torch.device("cpu")


def test_the_anchors_have_31_points():
    points = load_points(ANCHORS)
    assert len(points) == len(set(points)) == 31
    assert Point(1, 9, 8, 131072) in points
    assert str(points[-1]) == "16/65/16/4k"
    assert [parse_point(str(point)) for point in points] == points
    with pytest.raises(ConfigError, match="no such file"):
        load_points(ANCHORS.with_name("absent.csv"))


@pytest.mark.parametrize("text", ["1/9/8", "1/9/8/4k/2", "1/9/x/4k", "1/9/8/", "", "2/9/16/ragged"])
def test_a_malformed_point_is_refused(text):
    with pytest.raises(ConfigError, match="point"):
        parse_point(text)


def test_floor_by_hand():
    point = Point(1, 9, 8, 131072)
    assert point.kv_tokens == 131081
    assert point.bytes == 131081 * 1152 + 72 * (576 + 512) * 2 == 151_161_984
    assert point.flops == 2 * 1088 * 72 * 131081 == 20_536_722_432
    assert Rates(4.0e12, 8.0e14).floor(point) == (pytest.approx(37.790496), "mem")
    assert Rates(4.0e12, 4.0e14).floor(point) == (pytest.approx(51.34180608), "mma")


def test_floors_of_every_anchor_point_follow_from_two_rates():
    with ANCHORS.open() as file:
        rows = {(r["bs"], r["q_len"], r["heads"], r["prefix"]): r for r in csv.DictReader(file)}
    for key, row in rows.items():
        floor, bound = ANCHOR_RATES.floor(parse_point("/".join(key)))
        assert bound == row["bound"], key
        assert floor == pytest.approx(float(row["floor_us"]), abs=0.0051), key


def test_a_pool_holds_two_cold_sets_of_every_point():
    points = load_points(ANCHORS)
    slots = pool_slots(points)
    assert slots % PAGE == 0
    for point in points:
        sets = set_count(point, slots)
        assert sets >= 2
        assert sets == 256 or sets * point.kv_bytes >= COLD_BYTES
    with pytest.raises(ConfigError, match="slots"):
        set_count(points[0], 64)


@pytest.mark.parametrize("indices", ["scatter", "contig", "page64"])
def test_sets_are_disjoint_and_shaped_as_the_call_wants_them(indices):
    point = Point(2, 5, 3, 70)
    work = make_workload(point, make_pool(pool_slots([point], 3), CPU), indices, sets=3)
    used = torch.cat([torch.cat([kv.prefix_slots, kv.draft_slots]) for kv in work.sets])
    assert used.unique().numel() == used.numel() == 3 * point.kv_tokens
    assert int(used.max()) < work.pool.shape[0]
    assert work.kv_indptr.tolist() == [0, 70, 140]
    assert work.mask_indptr.tolist() == [0, 5 * 75, 2 * 5 * 75]
    assert work.mask.dtype == torch.uint8
    for request in range(2):
        cells = work.mask[work.mask_indptr[request] : work.mask_indptr[request + 1]].view(5, 75)
        assert cells[:, :70].all()
        assert torch.equal(cells[:, 70:].bool(), work.visible[request])
    for kv in work.sets:
        assert torch.equal(kv.draft_kv, work.pool[kv.draft_slots])
        if indices != "scatter":
            assert (kv.prefix_slots[:PAGE].diff() == 1).all()
        if indices == "page64":
            first = kv.pages[1, 1].item() * PAGE  # second page of the second request: its rows 64..
            assert kv.prefix_slots[70 + 64].item() == first
            assert kv.draft_slots[5].item() == first + 6


def test_queries_do_not_repeat_rows_of_the_pool():
    point = Point(1, 4, 2, 60)
    work = make_workload(point, make_pool(pool_slots([point], 2), CPU), "contig", sets=2)
    scores = work.q.float().flatten(0, 1) @ work.pool.float().T
    assert scores.abs().max() < 6 * 576**0.5  # a row times itself would be about 576


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("indices", ["scatter", "contig", "page64"])
def test_no_key_takes_all_the_weight(indices, seed):
    point = Point(2, 4, 3, 200)
    pool = make_pool(pool_slots([point], 2), CPU, seed)
    work = make_workload(point, pool, indices, seed, sets=2)
    for number, kv in enumerate(work.sets):
        keys = torch.cat([pool[kv.prefix_slots[:200]], kv.draft_kv[:4]]).float()
        scores = work.q[:4].float().flatten(0, 1) @ keys.T * SCALE
        weights = scores.softmax(-1)
        assert weights.max() < 0.9, number
        assert (weights > 1e-4).sum(-1).min() > 50, number


def test_ragged_lengths_are_given_in_the_order_of_the_requests():
    point = Point(16, 9, 16, "ragged")
    assert len(point.prefixes) == 16
    assert sum(point.prefixes) == 169_472
    assert (min(point.prefixes), max(point.prefixes)) == (1024, 65536)
    assert list(point.prefixes) != sorted(point.prefixes)


def test_random_trees_are_trees():
    for seed in range(20):
        visible = random_visibility(12, seed)
        assert visible.diagonal().all()
        assert visible[:, 0].all()
        assert not visible.triu(1).any()
        assert (visible.float() @ visible.float() > 0).le(visible).all()  # ancestors of ancestors are ancestors
    assert not torch.equal(random_visibility(12, 0), random_visibility(12, 1))
