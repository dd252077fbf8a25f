"""The independent law: by hand, against the product's, and its forward against the reference attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.toy.checkpoints import target_tensors

from treeverify.models.target import Target
from treeverify.ops.tree_attention.reference import tree_attention_reference
from treeverify.parity.law import exact_joint
from treeverify.parity.plain_law import PlainLaw, Setting, plain_law, plain_logits
from treeverify.tree.law import LawParams, target_law

LOGITS = np.log([0.1, 0.4, 0.2, 0.2, 0.1])


@pytest.fixture(scope="module")
def target():
    return Target(*target_tensors())


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Setting(1.0), {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.2, 4: 0.1}),
        (Setting(1.0, top_k=2), {1: 2 / 3, 2: 1 / 3}),  # the tie of 2 and 3 goes to 2
        (Setting(0.5, top_k=3), {1: 16 / 24, 2: 4 / 24, 3: 4 / 24}),
        (Setting(1.0, top_p=0.55), {1: 2 / 3, 2: 1 / 3}),
        (Setting(1.0, top_k=3, top_p=0.7), {1: 2 / 3, 2: 1 / 3}),  # 0.4 of 0.8 is short of 0.7, 0.6 of 0.8 is not
        (Setting(1.0, min_p=0.3), {1: 0.5, 2: 0.25, 3: 0.25}),
        (Setting(2.0, min_p=0.6), {1: 1 / (1 + 2 * 0.5**0.5), 2: 0.5**0.5 / (1 + 2 * 0.5**0.5), 3: None}),
    ],
    ids=str,
)
def test_laws_by_hand(setting, expected):
    got = plain_law(LOGITS, setting)
    assert got.keys() == expected.keys()
    assert sum(got.values()) == pytest.approx(1.0)
    assert all(value is None or got[token] == pytest.approx(value) for token, value in expected.items())


def test_the_products_law_agrees():
    rng = np.random.default_rng(3)
    for _ in range(200):
        logits = np.round(rng.normal(size=40) * 3, 1)  # rounded: ties
        k, p, m = int(rng.integers(1, 41)), float(rng.uniform(0.2, 1)), float(rng.uniform(0, 0.3))
        t = float(rng.uniform(0.3, 2))
        got = np.zeros(40)
        for token, probability in plain_law(logits, Setting(t, k, p, m)).items():
            got[token] = probability
        np.testing.assert_allclose(got, target_law(logits, LawParams(t, k, p, m)), atol=1e-12)


def test_the_plain_forward_is_the_references(target):
    ids = torch.randint(0, 2047, (3, 9), generator=torch.Generator().manual_seed(0))
    got = plain_logits(target, ids.numpy())

    def attend(layer, q, draft_kv, kv_pool):
        nothing = torch.zeros(2, dtype=torch.int64)
        return tree_attention_reference(
            q, draft_kv, kv_pool, nothing, nothing[:0], nodes=9, scale=target.scale, dtype=torch.float32
        )[0]

    for row, sequence in zip(got, ids, strict=True):
        logits, _ = target.forward(sequence, torch.arange(9), list(target.new_pool(1)), attend)
        torch.testing.assert_close(torch.from_numpy(row).float(), logits[-1], atol=1e-4, rtol=1e-4)


def test_the_joint_law_is_the_product_of_plain_laws(target):
    setting, told = Setting(1.0, top_k=2), []
    joint = exact_joint(PlainLaw(target, [5, 6], setting, told.append), 2)
    first = plain_law(plain_logits(target, np.array([[5, 6]]))[0], setting)
    for (one, two), probability in joint.items():
        second = plain_law(plain_logits(target, np.array([[5, 6, one]]))[0], setting)
        assert probability == pytest.approx(first[one] * second[two], rel=1e-4)
    assert told == [1, 2]
