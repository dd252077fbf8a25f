"""Dumps: which call is kept, that its file replays, and that nothing else is read, written or overwritten."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from observing import CPU, HEADS, LONGEST, NODES, make_call, results, sizes, visible

from treeverify.errors import ConfigError
from treeverify.integrations.sglang import dump
from treeverify.integrations.sglang.calls import Call
from treeverify.integrations.sglang.counters import Counters
from treeverify.integrations.sglang.dump import Dumper, Store, from_environment
from treeverify.observe.calls import load
from treeverify.observe.replay import replay

SIZES = sizes()


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
    call = make_call(form=form)
    served, ours = results(call)
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
    expected = torch.ones(NODES, NODES).tril().bool() if form == "chain" else visible()
    assert torch.equal(found.visible, expected)
    assert found.scale == call.scale
    assert found.notes == {"kernel": "split_kv", "layer": "2", "request": str(request_)}
    report = replay(found, CPU)
    assert report.worse
    assert (report.results[1].node, report.results[1].head) == (3, 1)
    assert report.results[0].max_row_ulp <= 0.5  # the baseline is the rounded reference: the inputs are complete


def test_a_call_within_the_bound_is_not_kept(dumper: Dumper, tmp_path: Path) -> None:
    call = make_call()
    served, ours = results(call)
    worst = int(served[3, 1].abs().argmax())
    ours[3, 1].view(torch.int16)[worst] -= 2  # two steps towards zero: at most 2 ULP
    _capture(dumper, call, served, ours)
    assert dumper.drain(wait=True) is None
    assert list(tmp_path.iterdir()) == []


def test_padding_is_no_breach_and_its_stale_metadata_is_not_followed(dumper: Dumper) -> None:
    call = make_call()
    served, ours = results(call)
    ours[NODES:] = torch.nan
    call.slots[NODES:] = 0
    _capture(dumper, call, served, ours)
    assert dumper.drain(wait=True) is None
    stale = call._replace(mask_indptr=torch.full((3,), 10**6))
    _capture(dumper, stale, served, served)
    assert dumper.drain(wait=True) is None


def test_a_row_of_nan_is_kept(dumper: Dumper) -> None:
    call = make_call()
    served, ours = results(call)
    ours[6] = torch.nan
    _capture(dumper, call, served, ours)
    path = dumper.drain(wait=True)
    assert path is not None
    assert load(path).notes["request"] == "1"


def test_the_first_call_stays_until_it_is_written_and_then_the_next_is_kept(dumper: Dumper, tmp_path: Path) -> None:
    for layer in (0, 1, 3):
        call = make_call(layer=layer)
        served, ours = results(call)
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
    call = make_call()
    served, ours = results(call)
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
    call = make_call()
    served, ours = results(call)
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


def test_a_label_that_begins_with_another_one_has_a_limit_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "verify-dp0-tp1-draft-0000.safetensors").touch()
    assert not Store(tmp_path, "dp0-tp1", 1).full
    assert Store(tmp_path, "dp0-tp1-draft", 1).full


def test_a_server_in_inference_mode_is_no_other_case(dumper: Dumper) -> None:
    call = make_call()
    served, ours = results(call)
    ours[0] *= 1.5
    with torch.inference_mode():
        _capture(dumper, call, served.clone(), ours.clone())
        assert dumper.drain(wait=False) is None
    assert dumper.drain(wait=True) is not None
    with torch.inference_mode():
        _capture(dumper, call, served, ours)
        assert dumper.drain(wait=True) is not None


def test_a_folder_that_cannot_be_read_stops_the_dumps_and_not_the_info_query(
    dumper: Dumper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(_: object) -> bool:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(dump.Store, "full", property(stale))
    call = make_call()
    served, ours = results(call)
    ours[0] *= 1.5
    _capture(dumper, call, served, ours)
    assert dumper.drain(wait=True) is None
    assert dumper.drain(wait=True) is None
    assert caplog.text.count("Stale file handle") == 1


def test_a_file_that_cannot_be_written_stops_the_dumps_and_not_the_server(
    dumper: Dumper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump, "save", full)
    call = make_call()
    served, ours = results(call)
    ours[0] *= 1.5
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            _capture(dumper, call, served, ours)
            assert dumper.drain(wait=True) is None
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1
    assert dumper.written == 0


@pytest.mark.parametrize(("prefix", "kept"), [(0, True), (LONGEST, True), (LONGEST + 1, False)])
def test_a_prefix_is_kept_whole_or_not_at_all(dumper: Dumper, prefix: int, kept: bool) -> None:
    call = make_call((prefix,))
    served, ours = results(call)
    ours[0] *= 1.5
    _capture(dumper, call, served, ours)
    path = dumper.drain(wait=True)
    assert (path is not None) is kept
    if path:
        assert load(path).prefix == prefix
        assert replay(load(path), CPU).results[0].max_row_ulp <= 0.5


def test_no_prefix_slots_at_all(dumper: Dumper) -> None:
    call = make_call((0,))._replace(kv_indices=torch.empty(0, dtype=torch.int64))
    served, ours = results(call)
    ours[0] *= 1.5
    _capture(dumper, call, served, ours)
    path = dumper.drain(wait=True)
    assert path is not None
    assert load(path).prefix == 0


def test_fewer_nodes_than_the_buffers_hold(dumper: Dumper) -> None:
    call = make_call(nodes=3)
    served, ours = results(call)
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
