"""Recorded calls: the file, and running one again."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from treeverify.errors import ContractError, ParityError
from treeverify.observe import replay as replaying
from treeverify.observe.bounds import BOUND_ULP, RESULT_ULP
from treeverify.observe.calls import RecordedCall, load, save
from treeverify.observe.replay import BASELINE, OURS, replay
from treeverify.ops.tree_attention.reference import tree_attention_reference

LIVE = Path(__file__).parents[1] / "data" / "live_verify_eager.safetensors"
CPU = torch.device("cpu")
SCALE = 192**-0.5


@pytest.fixture(scope="module")
def live() -> RecordedCall:
    """The call from a live server, with the CPU's own result as ours."""
    call = load(LIVE)
    return replace(call, ours=_exact(call).to(torch.bfloat16))


def _exact(call: RecordedCall) -> torch.Tensor:
    visible = call.visible.numpy()
    mask = torch.cat([torch.zeros(call.nodes, call.prefix, dtype=torch.bool), torch.from_numpy(visible)], 1)
    out, _ = tree_attention_reference(
        call.q,
        call.k,
        call.kbuf,
        torch.tensor([0, call.prefix]),
        torch.arange(call.prefix),
        nodes=call.nodes,
        scale=call.scale,
        mask=mask.flatten(),
        mask_indptr=torch.tensor([0, mask.numel()]),
    )
    return out


def _rewrite(path: Path, scale: str | None = str(SCALE), **changes: torch.Tensor | None) -> Path:
    tensors = {**load_file(LIVE), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, None if scale is None else {"sm_scale": scale})
    return path


def test_the_live_case_is_read() -> None:
    call = load(LIVE)
    assert (call.nodes, call.heads, call.prefix) == (16, 8, 37)
    assert call.scale == 0.07216878364870322
    assert call.visible.dtype == torch.bool
    assert torch.equal(call.visible, load_file(LIVE)["mask"][:, 37:])
    assert call.ours is None


def test_a_call_is_the_same_after_a_file(live: RecordedCall, tmp_path: Path) -> None:
    path = tmp_path / "call.safetensors"
    noted = replace(live, notes={"layer": "3", "rank": "1"})
    save(noted, path)
    back = load(path)
    for name in ("q", "k", "kbuf", "visible", "baseline", "ours"):
        assert torch.equal(getattr(back, name), getattr(noted, name)), name
    assert (back.scale, back.notes) == (noted.scale, noted.notes)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_never_written_over_and_nothing_is_left_behind(live: RecordedCall, tmp_path: Path) -> None:
    path = tmp_path / "call.safetensors"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        save(live, path)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_an_os_error(live: RecordedCall, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        save(live, tmp_path / "missing" / "call.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 200, 5000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(LIVE.read_bytes()[:keep])
    with pytest.raises(ParityError, match="not a readable safetensors file"):
        load(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ParityError, match="not a readable safetensors file"):
            load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"o": None}, "tensors: expected q, k, kbuf, mask, o"),
        ({"weights": torch.ones(2)}, "tensors: expected .* found .*weights"),
        ({"q": torch.ones(16, 8, 512).bfloat16()}, r"q: shape: expected \[nodes, heads, 576\], found \[16, 8, 512\]"),
        ({"q": torch.ones(16, 8, 576).half()}, r"q: dtype: .* found torch.float16"),
        ({"q": torch.ones(15, 8, 576).bfloat16()}, r"k: shape: expected \[15, 1, 576\], found \[16, 1, 576\]"),
        ({"kbuf": torch.ones(37, 576).bfloat16()}, r"kbuf: shape: expected \[37, 1, 576\], found \[37, 576\]"),
        ({"kbuf": torch.ones(37, 1, 576)}, r"kbuf: dtype: expected torch.bfloat16"),
        ({"kbuf": torch.ones(36, 1, 576).bfloat16()}, r"mask: shape: expected \[16, 16\] or \[16, 52\]"),
        ({"kbuf": torch.tensor(1.0).bfloat16()}, r"kbuf: shape"),
        ({"mask": torch.ones(16, 53)}, r"mask: dtype"),
        ({"o": torch.ones(16, 4, 512).bfloat16()}, r"o: shape: expected \[16, 8, 512\]"),
        ({"ours": torch.ones(16, 8, 512)}, r"ours: dtype"),
    ],
)
def test_tensors_that_make_no_call_are_refused_by_name(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    path = _rewrite(tmp_path / "bad.safetensors", **changes)
    with pytest.raises(ParityError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("scale", [None, "", "nan", "-1", "0", "inf", "one"])
def test_a_scale_that_is_none_is_refused(tmp_path: Path, scale: str | None) -> None:
    with pytest.raises(ParityError, match="sm_scale"):
        load(_rewrite(tmp_path / "bad.safetensors", scale))


def test_a_mask_of_the_tree_alone_is_the_same_call(tmp_path: Path) -> None:
    mask = load_file(LIVE)["mask"][:, 37:].contiguous()
    short = load(_rewrite(tmp_path / "short.safetensors", mask=mask.to(torch.uint8)))
    assert torch.equal(short.visible, load(LIVE).visible)


def test_the_live_case_passes_and_every_result_is_measured() -> None:
    report = replay(load(LIVE), CPU)
    assert not report.worse
    assert report.judged == "split_kv"
    assert [result.name for result in report.results] == [BASELINE, "split_kv", "float32 reference"]
    for result in report.results:
        assert 0 < result.relative < 2.5e-3
        assert 0 < result.max_row_ulp <= RESULT_ULP
        assert result.mismatched == 0
        assert 0 <= result.node < 16
        assert 0 <= result.head < 8


def test_the_mask_is_used() -> None:
    call = load(LIVE)
    chain = replace(call, visible=torch.ones(16, 16, dtype=torch.bool).tril())
    assert not torch.equal(chain.visible, call.visible)
    assert replay(chain, CPU).results[0].max_row_ulp > 8


def test_recorded_ours_is_judged_and_a_wrong_row_is_found(live: RecordedCall) -> None:
    assert live.ours is not None
    report = replay(live, CPU)
    assert (report.judged, report.worse) == (OURS, False)
    assert "recorded baseline is further" in report.verdict
    wrong = live.ours.clone()
    wrong[11, 5] *= 1.05
    report = replay(replace(live, ours=wrong), CPU)
    assert report.worse
    assert "recorded ours is further" in report.verdict
    found = report.results[1]
    assert (found.node, found.head) == (11, 5)


def test_one_value_that_is_off_is_found_though_the_call_as_a_whole_is_near(live: RecordedCall) -> None:
    assert live.ours is not None
    wrong = live.ours.clone()
    column = int(wrong[7, 6].abs().argmax())
    wrong[7, 6].view(torch.int16)[column] += 3
    report = replay(replace(live, ours=wrong), CPU)
    assert report.results[1].relative < report.results[0].relative
    assert report.worse


def test_an_implementation_that_cannot_run_the_call_is_named(
    live: RecordedCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, implementation: str, **__: object) -> None:
        raise ContractError(f"{implementation}: prefix too long")

    monkeypatch.setattr(replaying, "tree_attention", refuse)
    report = replay(live, CPU)
    assert report.skipped == {"split_kv": "split_kv: prefix too long"}
    assert [result.name for result in report.results] == [BASELINE, OURS, "float32 reference"]
    with pytest.raises(ParityError, match="split_kv cannot run it"):
        replay(replace(live, ours=None), CPU)


def test_a_bad_baseline_does_not_excuse_nan_in_ours(live: RecordedCall) -> None:
    assert live.ours is not None
    wrong, bad = live.ours.clone(), live.baseline.clone()
    wrong[2, 3, 4] = float("nan")
    bad[0] = 0
    report = replay(replace(live, ours=wrong, baseline=bad), CPU)
    assert report.worse
    assert (report.results[1].mismatched, report.results[1].node, report.results[1].head) == (1, 2, 3)


def test_ours_may_err_as_much_as_the_baseline(live: RecordedCall) -> None:
    off = live.baseline.clone()
    off[1, 1] *= 1.05
    assert not replay(replace(live, baseline=off, ours=off.clone()), CPU).worse
    assert replay(replace(live, ours=off.clone()), CPU).worse


def test_a_call_without_a_prefix_and_one_that_sees_nothing(tmp_path: Path, live: RecordedCall) -> None:
    assert live.ours is not None
    empty = replace(live, kbuf=live.kbuf[:0], visible=torch.eye(16, dtype=torch.bool))
    empty = replace(empty, ours=_exact(empty).bfloat16(), baseline=_exact(empty).bfloat16())
    save(empty, tmp_path / "empty.safetensors")
    assert not replay(load(tmp_path / "empty.safetensors"), CPU).worse
    blind = replace(empty, visible=torch.zeros(16, 16, dtype=torch.bool), ours=torch.zeros_like(live.ours))
    report = replay(replace(blind, baseline=torch.zeros_like(live.ours)), CPU)
    assert not report.worse
    assert all(result.max_row_ulp == 0 for result in report.results)


def _rounded_kernel(q: torch.Tensor, kv: torch.Tensor, scale: float, splits: int) -> torch.Tensor:
    """A correct kernel's arithmetic: bf16 inputs, fp32 sums, P rounded to bf16 against its split's maximum."""
    parts = []
    for rows in kv.chunk(splits):
        scores = (q.float() @ rows.float().T) * scale
        peak = scores.amax(-1, keepdim=True)
        weights = (scores - peak).exp()
        parts.append((peak, weights.sum(-1, keepdim=True), weights.bfloat16().float() @ rows[:, :512].float()))
    top = torch.stack([peak for peak, _, _ in parts]).amax(0)
    total = sum(weight * (peak - top).exp() for peak, weight, _ in parts)
    return (sum(out * (peak - top).exp() for peak, _, out in parts) / total).bfloat16()


@pytest.mark.parametrize("sharpness", [0.01, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("prefix", [37, 530])
def test_correct_results_keep_the_bounds(sharpness: float, prefix: int) -> None:
    g = torch.Generator().manual_seed(prefix)
    kv, q = (torch.randn(rows, 576, generator=g).bfloat16() for rows in (prefix, 512))
    scale = SCALE * sharpness
    exact = ((q.double() @ kv.double().T) * scale).softmax(-1) @ kv[:, :512].double()
    one, other = _rounded_kernel(q, kv, scale, 1), _rounded_kernel(q, kv, scale, 5)
    ulp = 2.0 ** (torch.frexp(exact.abs().amax(-1)).exponent - 8)
    for result in (one, other):
        assert (result.double() - exact).abs().amax(-1).div(ulp).max() <= RESULT_ULP
    apart = (one.double() - other.double()).abs().amax(-1) / ulp
    assert apart.max() <= BOUND_ULP
    assert (apart <= 1).double().mean() >= 0.999
