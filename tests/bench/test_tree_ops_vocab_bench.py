"""The benchmark of the operators that read a vocabulary, on a CPU: it checks, times, records, refuses wrong results."""

from __future__ import annotations

import pytest
import torch

from treeverify.bench import record, tree_ops_vocab
from treeverify.errors import ParityError

CPU = torch.device("cpu")
SIZES = (tree_ops_vocab.Ranking(2, 64, 5, depth=3), tree_ops_vocab.Walk(2, 64, nodes=7))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(tree_ops_vocab, "ROTATED", 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_point_leaves_a_record_for_each_variant_with_its_floor(size, tmp_path):
    output = tmp_path / "tree-ops.jsonl"
    tree_ops_vocab.run_point(size, CPU, output, rounds=2, commit="abc")
    kept = record.read(output, tree_ops_vocab.BENCHMARK)
    operator = "draft_topk" if isinstance(size, tree_ops_vocab.Ranking) else "tree_accept_sampled"
    assert {entry["impl"] for entry in kept} > {operator, "large copy"}
    for entry in kept:
        measures = entry["measures"]
        assert measures["ratio"] == pytest.approx(measures["us"] / measures["floor_us"], rel=0.02, abs=0.01)
    assert kept[0]["measures"]["bytes"] >= 2 * 64 * 4  # at least each request's root


def test_the_floor_of_a_ranking_is_every_logit_once(tmp_path):
    variants = tree_ops_vocab.ranking_variants(SIZES[0], CPU)
    assert {variant.bytes for variant in variants.values()} == {2 * 2 * 3 * 64}


@pytest.mark.parametrize(("operator", "size"), [("draft_topk", SIZES[0]), ("tree_accept_sampled", SIZES[1])])
def test_an_operator_that_writes_nothing_right_is_caught(operator, size, monkeypatch):
    def wrong(*_, out, **__):
        for tensor in vars(out).values():
            tensor.fill_(3)
        return out

    monkeypatch.setattr(tree_ops_vocab, operator, wrong)
    make = tree_ops_vocab.ranking_variants if operator == "draft_topk" else tree_ops_vocab.walk_variants
    with pytest.raises(ParityError, match=operator):
        make(size, CPU)
