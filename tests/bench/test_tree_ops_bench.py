"""The tree operators' benchmark on a CPU, at a tiny geometry: it checks, times, records, and refuses wrong results."""

from __future__ import annotations

import pytest
import torch

from treeverify.bench import record, tree_ops
from treeverify.bench.tree_ops_check import check_all
from treeverify.errors import ParityError

CPU = torch.device("cpu")
TINY = tree_ops.Geometry(2, 12, depth=3, vocab=64, layers=2, row=8, feature=5, shards=4)


def test_a_point_leaves_a_checked_record_for_each_operator_and_chain(tmp_path, monkeypatch):
    monkeypatch.setattr(tree_ops, "CALLS", 1)
    output = tmp_path / "tree-ops.jsonl"
    entries = tree_ops.run_point(TINY, CPU, output, rounds=2, commit="abc")
    kept = record.read(output, tree_ops.BENCHMARK)
    assert [entry["impl"] for entry in kept] == list(tree_ops.Workload(TINY, CPU).calls())
    assert kept == entries
    assert all(entry["measures"]["checked"] and len(entry["measures"]["us_runs"]) == 2 for entry in kept)
    assert kept[0]["measures"]["accepted"] == 4  # as deep as the draft


@pytest.mark.parametrize("operator", ["open", "rank", "build", "mask", "accept", "gather", "compact", "combine"])
def test_an_operator_that_does_nothing_is_caught(operator):
    work = tree_ops.Workload(TINY, CPU)
    work.roots += 1
    work.prefixes += 1
    work.samples = work.samples.roll(1, 0).contiguous()
    setattr(work, operator, lambda *arguments: None)
    if operator == "rank":
        work.ranked.log_probs.fill_(-1.0)
    with pytest.raises(
        ParityError, match=r"^(draft_window|draft_topk|tree_build|tree_mask|tree_accept|feature_gather|kv_compact)"
    ):
        check_all(work)
