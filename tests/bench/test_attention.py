from __future__ import annotations

import itertools
import shutil

import pytest
import torch

from treeverify.bench import attention, record, rivals
from treeverify.bench.attention import run_attention_bench
from treeverify.bench.attention_types import DeviceLostError, Entry, Options
from treeverify.bench.ceilings import build_mma_library, copy_ceiling, matmul_ceiling
from treeverify.bench.check import relative_error
from treeverify.bench.rivals import Implementation, catalogue
from treeverify.bench.workloads import SCALE, Point
from treeverify.ops.tree_attention.reference import tree_attention_reference

POINTS = [Point(2, 3, 2, 40), Point(1, 4, 2, 33)]


def options(tmp_path, *names, **changes):
    said = []
    made = Options(tmp_path / "out.jsonl", list(names), device="cpu", rounds=2, max_sets=2, say=said.append, **changes)
    return made, said


def test_a_run_leaves_one_checked_record_per_point_and_implementation(tmp_path):
    chosen, said = options(tmp_path, "treeverify-split_kv", "flashmla-causal", commit="abc")
    records = run_attention_bench(POINTS, chosen)
    assert record.read(chosen.output) == records
    ours = [entry for entry in records if entry["impl"] == "treeverify-split_kv"]
    assert [entry["case"]["prefix"] for entry in ours] == [40, 33]
    for entry in ours:
        assert entry["error"] < 2.5e-3
        assert len(entry["us_runs"]) == 2
        assert entry["ratio"] == pytest.approx(entry["us"] / entry["floor_us"], rel=1e-2)
        assert entry["commit"] == "abc"
        assert entry["case"]["mask"] == "tree"
    missing = [entry for entry in records if entry["impl"] == "flashmla-causal"]
    assert len(missing) == 2
    assert all("flash_mla" in entry["reason"] and entry["us"] is None for entry in missing)
    ceilings = [entry for entry in records if entry["benchmark"] == "ceiling"]
    assert [entry["impl"] for entry in ceilings] == ["copy", "wgmma", "mma-sync"] * 2
    assert any("flash_mla" in line for line in said)


def fake(name, result):
    def prepare(work):
        shape = (work.point.bs * work.point.nodes, work.point.heads, 512)

        def call():
            if isinstance(result, Exception):
                raise result
            return torch.full(shape, result)

        return [call for _ in work.sets]

    return Implementation(name, ("scatter",), tree=True, prepare=prepare)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (1.0, "wrong result"),
        (float("nan"), "wrong result"),
        (KeyError("its own business"), "KeyError: 'its own business'"),
    ],
)
def test_a_wrong_result_or_a_failure_is_recorded_and_not_timed(tmp_path, monkeypatch, result, reason):
    monkeypatch.setattr(rivals, "load", lambda name: fake(name, result))
    chosen, _ = options(tmp_path, "fa2-mla")
    (entry,) = [e for e in run_attention_bench(POINTS[:1], chosen) if e["benchmark"] == "attention"]
    assert entry["us"] is None
    assert reason in entry["reason"]


def failing_late(name):
    """Right at first; fails from the third run of its two calls on, in the timed rounds."""

    def prepare(work):
        exact, _ = tree_attention_reference(
            work.q,
            work.sets[0].draft_kv,
            work.pool,
            work.kv_indptr,
            work.sets[0].prefix_slots,
            nodes=work.point.nodes,
            scale=SCALE,
            mask=work.mask,
            mask_indptr=work.mask_indptr,
        )
        runs = itertools.count()

        def call():
            if next(runs) > 3:
                raise RuntimeError("CUDA error: an illegal memory access")
            return exact

        return [call]

    return Implementation(name, ("scatter",), tree=True, prepare=prepare)


def load_with_late_failure(name):
    return failing_late(name) if name == "fa2-mla" else catalogue.load(name)


def test_a_failure_in_the_timed_rounds_is_recorded_and_the_others_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(rivals, "load", load_with_late_failure)
    chosen, _ = options(tmp_path, "fa2-mla", "treeverify-split_kv")
    chosen.max_sets = 1
    late, ours = [e for e in run_attention_bench(POINTS[:1], chosen) if e["benchmark"] == "attention"]
    assert late["us"] is None
    assert late["reason"] == "in a timed round: RuntimeError: CUDA error: an illegal memory access"
    assert ours["us"] > 0


def test_one_that_breaks_the_device_in_a_round_is_recorded_at_every_remaining_point(tmp_path, monkeypatch):
    def lost(bench, point, entry):
        attention._write_entry(bench, point, entry, [], None)
        raise DeviceLostError(entry.implementation, point, str(entry.reason))

    monkeypatch.setattr(rivals, "load", load_with_late_failure)
    monkeypatch.setattr(attention, "_check_context", lost)
    chosen, _ = options(tmp_path, "fa2-mla", "treeverify-split_kv")
    chosen.max_sets = 1
    with pytest.raises(DeviceLostError):
        run_attention_bench(POINTS, chosen)
    written = record.read(chosen.output)
    assert [(entry["impl"], entry["case"]["prefix"]) for entry in written] == [("fa2-mla", 40), ("fa2-mla", 33)]
    assert written[1]["reason"].startswith("left out: fa2-mla broke the CUDA context at 2/3/2/40: in a timed round")


def test_points_beyond_the_time_budget_say_so(tmp_path):
    chosen, _ = options(tmp_path, "treeverify-split_kv", seconds=-1.0)
    records = run_attention_bench(POINTS, chosen)
    assert [entry["reason"].split(":")[0] for entry in records] == [attention.NOT_RUN] * 2


def test_the_command_line_runs_the_points_it_is_given(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "run_attention_bench", lambda points, options: seen.append((points, options)))
    attention.main(["--points", "1/9/8/4k,2/3/4/100", "--implementations", "fa2-mla", "--rounds", "7", "--commit", "c"])
    attention.main([])
    (points, chosen), (all_points, _) = seen
    assert points == [Point(1, 9, 8, 4096), Point(2, 3, 4, 100)]
    assert (chosen.implementations, chosen.rounds, chosen.commit) == (["fa2-mla"], 7, "c")
    assert len(all_points) == 31


def test_a_broken_device_is_recorded_and_named(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    chosen, _ = options(tmp_path, "fa2-mla")
    bench = attention._Bench(chosen, torch.device("cuda"), record.environment(commit="c"), [])
    entry = Entry("fa2-mla", "scatter", tree=False, reason="RuntimeError: CUDA error")
    with pytest.raises(DeviceLostError, match="fa2-mla broke the CUDA context at 2/3/2/40"):
        attention._check_context(bench, POINTS[0], entry)
    (written,) = record.read(chosen.output)
    assert (written["impl"], written["reason"]) == ("fa2-mla", "RuntimeError: CUDA error")


def test_a_lost_device_starts_a_new_process_without_the_culprit(tmp_path, monkeypatch):
    def lose(points, options):
        raise DeviceLostError("fa2-mla", points[1], "illegal memory access")

    started = []
    monkeypatch.setattr(attention, "run_attention_bench", lose)
    monkeypatch.setattr(attention.os, "execv", lambda program, arguments: started.extend(arguments))
    names = ["--implementations", "treeverify-naive,fa2-mla,fa3-causal"]
    attention.main(["--points", "1/9/8/4k,1/9/8/16k,1/9/8/64k", *names, "--output", "x", "--commit", "c"])
    seconds = float(started.pop(6).removeprefix("--seconds="))
    assert 199.0 < seconds <= 200.0
    assert started[3:] == [
        "--points=1/9/8/16k,1/9/8/64k",
        "--implementations=treeverify-naive,fa3-causal",
        "--output=x",
        "--rounds=5",
        "--commit=c",
    ]


def test_relative_error_by_hand():
    exact = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, float("nan")]), exact) != relative_error(exact, exact)


def test_ceilings_count_their_work():
    cpu = torch.device("cpu")
    assert copy_ceiling(cpu).work == 2 * 2**24
    matmul = matmul_ceiling(cpu)
    assert matmul.work == 2 * 256**3
    assert matmul.rate(2.0) == pytest.approx(matmul.work / 2e-6)
    assert matmul.replay.run() > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_mma_loop_compiles_once(tmp_path):
    library = build_mma_library((9, 0), tmp_path)
    stamp = library.stat().st_mtime_ns
    assert build_mma_library((9, 0), tmp_path) == library
    assert library.stat().st_mtime_ns == stamp
    assert list(tmp_path.iterdir()) == [library]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_of_rotated_calls_is_checked_and_timed(tmp_path):
    chosen = Options(tmp_path / "out.jsonl", ["treeverify-portable", "treeverify-naive"], rounds=2)
    records = run_attention_bench([Point(2, 9, 8, 300)], chosen)
    ours = [entry for entry in records if entry["impl"] == "treeverify-portable"]
    assert sorted(entry["case"]["indices"] for entry in ours) == ["contig", "scatter"]
    assert all(entry["us"] > 0 and entry["error"] < 2.5e-3 for entry in ours)
