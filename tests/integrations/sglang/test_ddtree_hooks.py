"""What DDTREE replaces in SGLang 0.5.23, without a model: registration, the mask of captured graphs, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.sglang
pytest.importorskip("sglang", reason="real SGLang: make test-sglang")

import torch  # noqa: E402
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.model_executor.runner import base_runner  # noqa: E402
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from tests.integrations.sglang import live_stub as live  # noqa: E402
from tests.integrations.sglang.processes import OLDEST  # noqa: E402

from treeverify.errors import ConfigError  # noqa: E402
from treeverify.integrations.sglang.ddtree import algorithm, compat, hooks, plugin  # noqa: E402

NAMES = """
from types import SimpleNamespace as Given
from treeverify.integrations.sglang import plugin
from treeverify.integrations.sglang.ddtree import algorithm, compact, compat, draft_backend, hooks
plugin.activate(); compat.check(); hooks.install(algorithm.NAME, algorithm.refuse_request)
hooks.add_to_report("ddtree", dict); compat.check(); compact.check()
chosen = draft_backend.default(Given(device="cuda", dtype="auto"), Given(head_dim=64))
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
found = SpeculativeAlgorithm.from_string("ddtree")
print(found.is_dflash(), found.need_topk(), found.supports_grammar_overlap(), found.is_speculative(), chosen)
"""


@pytest.mark.parametrize("version", ["0.5.23", "0.5.17"])
def test_names_and_signatures(version: str) -> None:
    path = {} if version == "0.5.23" else {"PYTHONPATH": str(OLDEST)}
    run = subprocess.run(
        [sys.executable, "-c", NAMES], capture_output=True, text=True, env=os.environ | path, check=False
    )
    assert (run.returncode, run.stdout.splitlines()[-1:]) == (0, ["True False False True triton"]), run.stderr


@pytest.fixture(autouse=True)
def installed() -> None:
    plugin.register()
    hooks.install(algorithm.NAME, algorithm.refuse_request)


def graphs(algo: Any, *, draft: bool = False) -> Any:
    """Just enough of a graph runner for ``get_spec_info``."""
    runner = SimpleNamespace(spec_algorithm=algo, is_draft_worker=draft, attn_backend=object.__new__(TritonAttnBackend))
    return SimpleNamespace(
        model_runner=runner,
        captured_req_width=live.NODES,
        buffers=SimpleNamespace(custom_mask=torch.ones(4096, dtype=torch.bool)),
        _capture_ragged_verify_layout=lambda _: None,
    )


def test_a_capture_has_the_mask_and_dflash_has_none() -> None:
    ours = SpeculativeAlgorithm.from_string("DDTREE")
    held = graphs(ours)
    assert DecodeCudaGraphRunner.get_spec_info(held, live.NODES).custom_mask is held.buffers.custom_mask
    assert DecodeCudaGraphRunner.get_spec_info(graphs(ours, draft=True), live.NODES).custom_mask is None
    assert DecodeCudaGraphRunner.get_spec_info(graphs(SpeculativeAlgorithm.DFLASH), live.NODES).custom_mask is None


def test_the_captured_metadata_reads_the_mask_buffer() -> None:
    """The trap: without a mask in the capture the graph verifies a chain, whatever a replay is given."""
    with live.server():
        runner = live.make_runner(2)
        backend = TritonAttnBackend(runner)
        backend.init_cuda_graph_state(2, 2 * live.NODES)
        for algo, has_mask in (
            (SpeculativeAlgorithm.from_string("DDTREE"), True),
            (SpeculativeAlgorithm.DFLASH, False),
        ):
            batch = live.verify_batch(runner, (1, 1))
            batch.spec_info = DecodeCudaGraphRunner.get_spec_info(graphs(algo), live.NODES)
            size = 2 * live.NODES * (1 + live.NODES)
            if batch.spec_info.custom_mask is not None:
                batch.spec_info.custom_mask = batch.spec_info.custom_mask[:size]
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            found = backend.forward_metadata.custom_mask
            assert (found is not None) is has_mask
            if has_mask:
                assert found.data_ptr() == backend.verify_mask.buffer.data_ptr()
            runner.token_to_kv_pool_allocator.clear()


def test_forwards_that_warm_up_have_mask_and_width() -> None:
    ours, mask = SpeculativeAlgorithm.from_string("DDTREE"), torch.ones(8, dtype=torch.bool)
    with live.server():
        target = base_runner.create_dummy_verify_input(ours, mask, 17, False)
        draft = base_runner.create_dummy_verify_input(ours, mask, 5, True)
    assert target.custom_mask is mask
    assert (target.draft_token_num, target.num_tokens_per_req) == (17, 17)
    assert draft.custom_mask is None
    assert (draft.draft_token_num, draft.num_tokens_per_req) == (5, 5)


def test_the_draft_runs_its_block_and_the_target_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SpeculativeAlgorithm.from_string("DDTREE")
    monkeypatch.setattr(plugin, "_block", 8)
    assert ours.get_num_tokens_per_req_for_target_verify(33, is_draft_worker=True) == 8
    assert ours.get_num_tokens_per_req_for_target_verify(33, is_draft_worker=False) == 33
    monkeypatch.setattr(plugin, "_block", None)
    with pytest.raises(ConfigError, match="before its configuration was read"):
        ours.get_num_tokens_per_req_for_target_verify(33, is_draft_worker=True)


def test_a_draft_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    arguments = SimpleNamespace(
        speculative_draft_model_path=str(tmp_path), speculative_draft_model_revision=None, trust_remote_code=False
    )
    with pytest.raises(ConfigError, match=r"expected a DFlash drafter .* got architectures \['LlamaForCausalLM'\]"):
        plugin._read_block(arguments)
    arguments.speculative_draft_model_path = None
    with pytest.raises(ConfigError, match="expected --speculative-draft-model-path, got none"):
        plugin._read_block(arguments)


def test_a_changed_signature_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_batch_generation(self: object, work: object) -> None: ...

    monkeypatch.setattr(compat.worker_class(), "forward_batch_generation", forward_batch_generation)
    with pytest.raises(ConfigError, match=r"forward_batch_generation: expected .*self, batch, on_publish, found self"):
        compat.check()


def test_a_row_of_the_slot_table_holds_all_that_is_reserved() -> None:
    from sglang.srt.mem_cache import allocation_sizing, kv_cache_configurator

    with live.server(page_size=1):
        reserve = allocation_sizing.get_alloc_reserve_per_decode()
        assert allocation_sizing.get_req_to_token_extra_context_len() < reserve == 2 * 16  # SGLang's own is too small
        assert kv_cache_configurator.get_req_to_token_extra_context_len() == reserve
