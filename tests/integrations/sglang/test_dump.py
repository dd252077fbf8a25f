"""Dumps: which call is kept, that its file replays, and that nothing else is read, written or overwritten."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from treeverify.errors import ConfigError
from treeverify.integrations.sglang import dump
from treeverify.integrations.sglang.calls import Call
from treeverify.integrations.sglang.counters import Counters
from treeverify.integrations.sglang.dump import Dumper, Sizes, Store, from_environment
from treeverify.ops.tree_attention.reference import tree_attention_reference
from treeverify.parity.call_replay import replay
from treeverify.parity.calls import load
from treeverify.tree.packing import pack_rows

NODES, HEADS, SLOTS, LONGEST = 5, 2, 80, 24
CPU = torch.device("cpu")
PARENTS = (-1, 0, 0, 1, 2)
SIZES = Sizes(NODES, HEADS, LONGEST, torch.bfloat16, CPU)


def _visible(nodes: int = NODES) -> torch.Tensor:
    seen = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(PARENTS[:nodes]):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def _call(prefixes: Sequence[int] = (7, 3), form: str = "mask", nodes: int = NODES, layer: int = 2) -> Call:
    """A call over a pool that is NaN wherever no prefix names it; the mask's prefix columns hold garbage."""
    g = torch.Generator().manual_seed(sum(prefixes))
    tokens, total = nodes * len(prefixes), sum(prefixes)
    slots = torch.randperm(SLOTS - 1, generator=g)[:total] + 1
    pool = torch.full((SLOTS, 1, 576), torch.nan, dtype=torch.bfloat16)
    pool[slots] = torch.randn(total, 1, 576, generator=g).bfloat16()
    cells = [torch.cat([torch.ones(nodes, p, dtype=torch.bool), _visible(nodes)], 1).flatten() for p in prefixes]
    bits = torch.from_numpy(pack_rows(_visible(nodes).numpy()).view("int64")).expand(len(prefixes), -1, -1)
    return Call(
        q=torch.randn(tokens, HEADS, 576, generator=g).bfloat16(),
        draft_kv=torch.randn(tokens, 1, 576, generator=g).bfloat16(),
        kv_pool=pool,
        kv_indptr=torch.tensor([0, *prefixes]).cumsum(0).to(torch.int32),
        kv_indices=torch.cat([slots, torch.full((9,), 10**9)]),  # beyond kv_indptr[-1]: never to be read
        mask=torch.cat(cells).to(torch.uint8) if form == "mask" else None,
        mask_indptr=torch.tensor([0, *(nodes * (p + nodes) for p in prefixes)]).cumsum(0) if form == "mask" else None,
        tree_bits=bits.contiguous() if form == "bits" else None,
        slots=torch.arange(tokens) + 1,
        nodes=nodes,
        scale=192**-0.5,
        layer=layer,
    )


def _results(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    names = ("nodes", "scale", "mask", "mask_indptr", "tree_bits")
    options = {name: getattr(call, name) for name in names}
    out, _ = tree_attention_reference(*call[:5], **options)
    return out.bfloat16(), out.bfloat16()


def _capture(dumper: Dumper, call: Call, served: torch.Tensor, ours: torch.Tensor) -> None:
    counters = Counters(4, NODES, HEADS, CPU)
    live = call.slots != 0
    dumper.capture(call, served, ours, counters.record(call.layer, served, ours, live, call.nodes))


@pytest.fixture
def dumper(tmp_path: Path) -> Dumper:
    return Dumper(Store(tmp_path, "dp0-tp1", 3), SIZES, {"kernel": "split_kv"})


@pytest.mark.parametrize("form", ["mask", "bits", "chain"])
@pytest.mark.parametrize("request_", [0, 1])
def test_the_breaching_request_is_written_and_replays(dumper: Dumper, tmp_path: Path, form: str, request_: int) -> None:
    call = _call(form=form)
    served, ours = _results(call)
    row = request_ * NODES + 3
    ours[row, 1] *= 1.5
    _capture(dumper, call, served, ours)
    path = dumper.drain(wait=True)
    assert path == tmp_path / "verify-dp0-tp1-0000.safetensors"
    assert dumper.written == 1
    found = load(path)
    tokens = slice(request_ * NODES, (request_ + 1) * NODES)
    named = call.kv_indices[call.kv_indptr[request_] : call.kv_indptr[request_ + 1]]
    assert torch.equal(found.q, call.q[tokens])
    assert torch.equal(found.k, call.draft_kv[tokens])
    assert torch.equal(found.kbuf, call.kv_pool[named])
    assert torch.equal(found.baseline, served[tokens])
    assert found.ours is not None
    assert torch.equal(found.ours, ours[tokens])
    expected = torch.ones(NODES, NODES).tril().bool() if form == "chain" else _visible()
    assert torch.equal(found.visible, expected)
    assert found.scale == call.scale
    assert found.notes == {"kernel": "split_kv", "layer": "2", "request": str(request_)}
    report = replay(found, CPU)
    assert report.worse
    assert (report.results[1].node, report.results[1].head) == (3, 1)
    assert report.results[0].max_row_ulp <= 0.5  # the baseline is the rounded reference: the inputs are complete


def test_a_call_within_the_bound_is_not_kept(dumper: Dumper, tmp_path: Path) -> None:
    call = _call()
    _capture(dumper, call, *_results(call))
    assert dumper.drain(wait=True) is None
    assert list(tmp_path.iterdir()) == []


def test_padding_is_no_breach_and_its_stale_metadata_is_not_followed(dumper: Dumper) -> None:
    call = _call()
    served, ours = _results(call)
    ours[NODES:] = torch.nan
    call.slots[NODES:] = 0
    _capture(dumper, call, served, ours)
    assert dumper.drain(wait=True) is None
    stale = call._replace(mask_indptr=torch.full((3,), 10**6))
    _capture(dumper, stale, served, served)
    assert dumper.drain(wait=True) is None


def test_a_row_of_nan_is_kept(dumper: Dumper) -> None:
    call = _call()
    served, ours = _results(call)
    ours[6] = torch.nan
    _capture(dumper, call, served, ours)
    path = dumper.drain(wait=True)
    assert path is not None
    assert load(path).notes["request"] == "1"


def test_the_first_call_stays_until_it_is_written_and_then_the_next_is_kept(dumper: Dumper, tmp_path: Path) -> None:
    for layer in (0, 1, 3):
        call = _call(layer=layer)
        served, ours = _results(call)
        ours[0] *= 1.5
        _capture(dumper, call, served, ours)
        if layer == 0:
            continue
        path = dumper.drain(wait=True)
        assert path is not None
        assert load(path).notes["layer"] == ("0" if layer == 1 else "3")
        assert dumper.drain(wait=True) is None
    assert len(list(tmp_path.iterdir())) == dumper.written == 2


def test_without_waiting_a_call_is_written_once(dumper: Dumper, tmp_path: Path) -> None:
    call = _call()
    served, ours = _results(call)
    ours[0] *= 1.5
    assert dumper.drain(wait=False) is None
    _capture(dumper, call, served, ours)
    written = [dumper.drain(wait=False) for _ in range(5)]
    assert len([path for path in written if path]) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_the_number_of_files_is_bounded_over_runs_and_none_is_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "verify-dp0-tp0-0000.safetensors"
    earlier = tmp_path / "verify-dp0-tp1-0001.safetensors"
    for path in (other, earlier):
        path.write_text("mine")
    dumper = Dumper(Store(tmp_path, "dp0-tp1", 3), SIZES, {})
    call = _call()
    served, ours = _results(call)
    ours[0] *= 1.5
    for _ in range(5):
        _capture(dumper, call, served, ours)
        dumper.drain(wait=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [other.name, *(f"verify-dp0-tp1-000{n}.safetensors" for n in range(3))]
    assert earlier.read_text() == other.read_text() == "mine"
    assert len([record for record in caplog.records if "KDTREE_DUMP_MAX" in record.message]) == 1
    monkeypatch.setenv("KDTREE_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("KDTREE_DUMP_MAX", "3")
    assert from_environment("dp0-tp1", SIZES, {}) is None


def test_a_file_that_cannot_be_written_stops_the_dumps_and_not_the_server(
    dumper: Dumper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump, "save", full)
    call = _call()
    served, ours = _results(call)
    ours[0] *= 1.5
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            _capture(dumper, call, served, ours)
            assert dumper.drain(wait=True) is None
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1
    assert dumper.written == 0


@pytest.mark.parametrize(("prefix", "kept"), [(0, True), (LONGEST, True), (LONGEST + 1, False)])
def test_a_prefix_is_kept_whole_or_not_at_all(dumper: Dumper, prefix: int, kept: bool) -> None:
    call = _call((prefix,))
    served, ours = _results(call)
    ours[0] *= 1.5
    _capture(dumper, call, served, ours)
    path = dumper.drain(wait=True)
    assert (path is not None) is kept
    if path:
        assert load(path).prefix == prefix
        assert replay(load(path), CPU).results[0].max_row_ulp <= 0.5


def test_no_prefix_slots_at_all(dumper: Dumper) -> None:
    call = _call((0,))._replace(kv_indices=torch.empty(0, dtype=torch.int64))
    served, ours = _results(call)
    ours[0] *= 1.5
    _capture(dumper, call, served, ours)
    path = dumper.drain(wait=True)
    assert path is not None
    assert load(path).prefix == 0


def test_fewer_nodes_than_the_buffers_hold(dumper: Dumper) -> None:
    call = _call(nodes=3)
    served, ours = _results(call)
    ours[4] *= 1.5
    _capture(dumper, call, served, ours)
    path = dumper.drain(wait=True)
    assert path is not None
    assert load(path).nodes == 3
    assert replay(load(path), CPU).results[1].node == 1


def test_dumps_are_off_by_default_and_a_bad_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDTREE_DUMP_DIR", raising=False)
    assert from_environment("dp0-tp0", SIZES, {}) is None
    monkeypatch.setenv("KDTREE_DUMP_DIR", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="KDTREE_DUMP_DIR: expected a folder"):
        from_environment("dp0-tp0", SIZES, {})
    monkeypatch.setenv("KDTREE_DUMP_DIR", str(tmp_path))
    assert isinstance(from_environment("dp0-tp0", SIZES, {}), Dumper)
