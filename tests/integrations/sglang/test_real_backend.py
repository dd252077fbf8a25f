"""Real SGLang 0.5.23 in Triton's interpreter: ``make test-sglang``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.sglang
pytest.importorskip("sglang", reason="real SGLang: make test-sglang")

import live_stub as live  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.attention import attention_registry, triton_backend  # noqa: E402

from treeverify.errors import ConfigError  # noqa: E402
from treeverify.integrations.sglang import compat, names, plugin, probe  # noqa: E402

BOUND = 1e-5
"""Both sides are float32 here: sums of at most 128 rows of magnitude 1."""


@pytest.fixture(autouse=True)
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_served", [])
    plugin.activate()


def serve(
    monkeypatch: pytest.MonkeyPatch, mode: str, prefixes: Sequence[int] = (21, 5, 64), **options: Any
) -> tuple[Any, torch.Tensor]:
    monkeypatch.setenv("KDTREE_VERIFY", mode)
    with live.server():
        runner = live.make_runner(len(prefixes), **options)
        backend = attention_registry.ATTENTION_BACKENDS["treeverify"](runner)
        return backend, live.verify(backend, runner, live.verify_batch(runner, prefixes))


def test_every_name_and_signature_is_as_expected() -> None:
    compat.check_registration()
    compat.check()


def test_every_name_and_signature_is_as_expected_in_0_5_17() -> None:
    oldest = Path(sys.prefix) / "sglang-0.5.17"
    assert oldest.is_dir(), "scripts/sglang_cpu_env.sh installs it there"
    code = """
from treeverify.integrations.sglang import compat, plugin, probe
plugin.activate(); compat.check(); compat.install_hooks(probe.report); compat.check(); print(compat.version())
"""
    environment = os.environ | {"PYTHONPATH": str(oldest)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (run.returncode, run.stdout.splitlines()[-1:]) == (0, ["0.5.17"]), run.stderr


@pytest.mark.parametrize("prefixes", [(21,), (21, 5, 64), (1, 1)])
def test_outputs_agree_in_all_modes(monkeypatch: pytest.MonkeyPatch, prefixes: tuple[int, ...]) -> None:
    stock, off = serve(monkeypatch, "off", prefixes)
    assert type(stock) is triton_backend.TritonAttnBackend
    _, validate = serve(monkeypatch, "validate", prefixes)
    assert torch.equal(validate, off)
    ours, on = serve(monkeypatch, "on", prefixes)
    assert (on - off).abs().max() < BOUND
    assert not torch.equal(on, off)  # it is another kernel indeed
    assert isinstance(ours, triton_backend.TritonAttnBackend)
    validated, served = probe.report()["backends"]
    (figures,) = validated["layers"]
    assert figures["rows"] == len(prefixes) * live.NODES * live.HEADS
    assert figures["max_abs"] < BOUND
    assert figures["mismatched_rows"] == 0
    assert served["left_to_parent"] == validated["left_to_parent"] == {}


def test_on_computes_nothing_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: object, **__: object) -> None:
        raise AssertionError("the parent's kernel ran")

    monkeypatch.setattr(triton_backend.TritonAttnBackend, "_forward_extend_kernel", called)
    serve(monkeypatch, "on")
    with pytest.raises(AssertionError, match="the parent's kernel ran"):
        serve(monkeypatch, "off")


def test_validate_catches_a_dropped_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = compat.verify_call
    monkeypatch.setattr(compat, "verify_call", lambda *a: stock(*a)._replace(mask=None, mask_indptr=None))
    serve(monkeypatch, "validate")
    (backend,) = probe.report()["backends"]
    assert backend["layers"][0]["max_row_ulp"] > 8


def test_graph_metadata_with_padded_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers that a CUDA graph reads: captured for 4 requests, replayed with 2; no graph on a CPU."""
    results = {}
    for mode in ("off", "validate", "on"):
        monkeypatch.setenv("KDTREE_VERIFY", mode)
        with live.server():
            runner = live.make_runner(4)
            backend = attention_registry.ATTENTION_BACKENDS["treeverify"](runner)
            backend.init_cuda_graph_state(4, 4 * live.NODES)
            fill = backend.get_cuda_graph_seq_len_fill_value()
            backend.init_forward_metadata_out_graph(live.verify_batch(runner, (fill,) * 4), in_capture=True)
            runner.token_to_kv_pool_allocator.clear()
            runner.req_to_token_pool.req_to_token.zero_()
            batch = live.verify_batch(runner, (21, 5))
            batch.batch_size = 4
            batch.req_pool_indices = torch.cat([batch.req_pool_indices, torch.zeros(2, dtype=torch.int64)])
            batch.seq_lens = torch.cat([batch.seq_lens, torch.full((2,), fill)])
            batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(2 * live.NODES, dtype=torch.int64)])
            batch.kv_loc_plan = None
            runner.kv_index_translator.bind_own_plan(batch)
            backend.init_forward_metadata_out_graph(batch)
            assert backend.forward_metadata.custom_mask.dtype is torch.uint8
            results[mode] = live.verify(backend, runner, batch, prepared=True)
    tokens = 2 * live.NODES
    assert torch.equal(results["validate"], results["off"])
    assert (results["on"] - results["off"])[:tokens].abs().max() < BOUND
    assert results["on"].isfinite().all()
    validated, _ = probe.report()["backends"]
    (figures,) = validated["layers"]
    assert figures["rows"] == tokens * live.HEADS  # padding is not counted
    assert figures["max_abs"] < BOUND


def test_a_draft_runner_gets_the_stock_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_VERIFY", "on")
    with live.server():
        backend = attention_registry.ATTENTION_BACKENDS["treeverify"](live.make_runner(1, draft=True))
    assert type(backend) is triton_backend.TritonAttnBackend


@pytest.mark.parametrize("mode", ["validate", "on"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logit_cap": 30.0}, "layer 0: logit cap 30.0"),
        ({"sliding_window_size": 64}, "layer 0: sliding window of 64"),
        ({"arch": AttentionArch.MHA}, "the model's attention is not MLA"),
    ],
)
def test_what_is_not_computed_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, mode: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"KDTREE_VERIFY={mode}.*{reason}"):
        serve(monkeypatch, mode, **options)


def test_a_changed_signature_stops_the_server_with_name_expected_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_extend(self: object, query: object) -> None: ...

    monkeypatch.setattr(triton_backend.TritonAttnBackend, "forward_extend", forward_extend)
    expected = r"SGLang 0\.5\.23: .*TritonAttnBackend\.forward_extend: expected .*self, q, k, v.*found self, query"
    with pytest.raises(ConfigError, match=expected):
        serve(monkeypatch, "off")


def test_another_version_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "version", lambda: "0.5.16")
    monkeypatch.setattr(compat, "version", lambda: "0.5.16")
    plugin.activate()
    with pytest.raises(ConfigError, match=r"expected 0\.5\.17 to 0\.5\.23, found 0\.5\.16"):
        serve(monkeypatch, "on")


def test_dflash_builds_no_mask_for_ours_as_for_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    ours, _ = serve(monkeypatch, "on")
    stock, _ = serve(monkeypatch, "off")
    assert resolve_dflash_verify_mask_policy(ours)[1] is resolve_dflash_verify_mask_policy(stock)[1] is False


def test_draft_backends_of_our_name_are_tritons() -> None:
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    compat.install_hooks(dict)
    seen = {}
    maker = object.__new__(DraftBackendFactory)
    maker.draft_attn_backend = "treeverify"
    entry = lambda: seen.setdefault("made", ("triton", None))  # noqa: E731
    with live.server():
        maker._create_backend("decode_attention_backend", {"triton": entry}, "no {backend_type}")
    assert seen == {"made": ("triton", None)}


def test_the_servers_info_carries_the_report() -> None:
    from types import SimpleNamespace

    from sglang.srt.managers.scheduler import Scheduler

    compat.install_hooks(probe.report)
    scheduler = SimpleNamespace(
        internal_state=SimpleNamespace(get_internal_state=lambda _: SimpleNamespace(internal_state={}))
    )
    answer = Scheduler.get_internal_state(scheduler, None)
    assert answer.internal_state["treeverify"]["sglang"] == "0.5.23"
