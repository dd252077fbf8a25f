"""Real SGLang 0.5.23 in Triton's interpreter: ``make test-sglang``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.sglang
pytest.importorskip("sglang", reason="real SGLang: make test-sglang")

import live_stub as live  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.attention import attention_registry, triton_backend  # noqa: E402
from tests.integrations.sglang.processes import OLDEST  # noqa: E402

from treeverify.control.schema import PluginState  # noqa: E402
from treeverify.env import VerifyMode  # noqa: E402
from treeverify.errors import ConfigError  # noqa: E402
from treeverify.integrations.sglang import calls, compat, hooks, modes, names, plugin, probe  # noqa: E402

BOUND = 1e-5
"""Both sides are float32 here: sums of at most 128 rows of magnitude 1."""


@pytest.fixture(autouse=True)
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_served", [])
    monkeypatch.setattr(probe, "_observer", None)
    monkeypatch.setattr(modes, "_current", None)
    monkeypatch.delenv("KDTREE_VERIFY_ALLOW", raising=False)
    plugin.activate()


def start(monkeypatch: pytest.MonkeyPatch, mode: str, *others: str) -> None:
    """Let the next backend be that of a process started in ``mode``, which may switch to ``others``."""
    monkeypatch.setattr(modes, "_current", None)
    monkeypatch.setenv("KDTREE_VERIFY", mode)
    monkeypatch.setenv("KDTREE_VERIFY_ALLOW", ",".join((mode, *others)))


def serve(
    monkeypatch: pytest.MonkeyPatch, mode: str, prefixes: Sequence[int] = (21, 5, 64), **options: Any
) -> tuple[Any, torch.Tensor]:
    start(monkeypatch, mode)
    with live.server():
        runner = live.make_runner(len(prefixes), **options)
        backend = attention_registry.ATTENTION_BACKENDS["treeverify"](runner)
        return backend, live.run(backend, runner, live.verify_batch(runner, prefixes))


def test_every_name_and_signature_is_as_expected() -> None:
    compat.check_registration()
    compat.check()


def test_every_name_and_signature_is_as_expected_in_0_5_17() -> None:
    assert OLDEST.is_dir(), "scripts/sglang_cpu_env.sh installs it there"
    code = """
from treeverify.integrations.sglang import compat, hooks, plugin, probe
plugin.activate(); compat.check()
hooks.install(hooks.Providers(probe.rank, probe.server, plugin.create_draft, probe.step))
compat.check(); print(compat.version())
"""
    environment = os.environ | {"PYTHONPATH": str(OLDEST)}
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
    validated, served = probe.rank(0).backends
    (figures,) = validated.layers
    assert figures.rows == len(prefixes) * live.NODES * live.HEADS
    assert figures.max_abs < BOUND
    assert figures.mismatched_rows == 0
    assert served.served["on"].rows == figures.rows
    assert served.left_to_parent == validated.left_to_parent == {}


def test_on_computes_nothing_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: object, **__: object) -> None:
        raise AssertionError("the parent's kernel ran")

    monkeypatch.setattr(triton_backend.TritonAttnBackend, "_forward_extend_kernel", called)
    serve(monkeypatch, "on")
    with pytest.raises(AssertionError, match="the parent's kernel ran"):
        serve(monkeypatch, "off")


def test_validate_catches_a_dropped_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = calls.extend_call
    monkeypatch.setattr(calls, "extend_call", lambda *a: stock(*a)._replace(mask=None, mask_indptr=None))
    serve(monkeypatch, "validate")
    (backend,) = probe.rank(0).backends
    assert backend.layers[0].max_row_ulp > 8


def test_graph_metadata_with_padded_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers that a CUDA graph reads: captured for 4 requests, replayed with 2; no graph on a CPU."""
    results = {}
    for mode in ("off", "validate", "on"):
        start(monkeypatch, mode)
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
            results[mode] = live.run(backend, runner, batch, prepared=True)
    tokens = 2 * live.NODES
    assert torch.equal(results["validate"], results["off"])
    assert (results["on"] - results["off"])[:tokens].abs().max() < BOUND
    assert results["on"].isfinite().all()
    validated, _ = probe.rank(0).backends
    (figures,) = validated.layers
    assert figures.rows == tokens * live.HEADS  # padding is not counted
    assert figures.max_abs < BOUND


def test_a_draft_runner_gets_the_stock_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, "on")
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
    with pytest.raises(ConfigError, match=f"KDTREE_VERIFY={mode}, modes allowed: {mode}: .*{reason}"):
        serve(monkeypatch, mode, **options)


@pytest.mark.parametrize(
    ("requests", "speculative", "reason"),
    [
        (58_254, True, None),  # times 9 nodes and 8 heads: 4,194,288 rows
        (58_255, True, "58255 running requests of 9 draft tokens and 8 heads are 4194360 rows, more than 4194304"),
        (64_528, False, "64528 running requests, more than 64527"),
    ],
)
def test_more_requests_than_a_call_can_hold_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, requests: int, speculative: bool, reason: str | None
) -> None:
    start(monkeypatch, "on")
    with live.server(**({} if speculative else {"speculative_algorithm": None, "speculative_num_draft_tokens": None})):
        runner = live.make_runner(requests, speculative=speculative)
        make = attention_registry.ATTENTION_BACKENDS["treeverify"]
        if reason is None:
            make(runner)
        else:
            with pytest.raises(ConfigError, match=f"{reason}.*--max-running-requests"):
                make(runner)


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


def _install() -> None:
    hooks.install(hooks.Providers(probe.rank, probe.server, plugin.create_draft, probe.step))


def test_draft_backends_of_our_name_are_ours_for_extend_and_tritons_for_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    start(monkeypatch, "off", "on")
    _install()
    with live.server():
        runner = live.make_runner(3, draft=True)
        runner.draft_attention_backend = "treeverify"
        maker = DraftBackendFactory(runner, topk=4, speculative_num_steps=4)
        made = lambda name, make: maker._create_backend(name, {"triton": make}, "no {backend_type}")  # noqa: E731
        assert made("decode_attention_backend", lambda: ("triton", None)) is None
        extend = made("prefill_attention_backend", maker._create_triton_prefill_backend)
    assert isinstance(extend, triton_backend.TritonAttnBackend)
    assert (type(extend).__name__, extend.draft) == (compat.CLASS_NAME, True)
    assert extend.verifier.switch is modes.current()


def test_a_draft_extend_is_ours_as_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {}
    for mode in ("off", "validate", "on"):
        start(monkeypatch, "off", "validate", "on")
        modes.current().mode = VerifyMode(mode)
        with live.server():
            runner = live.make_runner(3, draft=True)
            backend = plugin.create_draft(runner)
            results[mode] = live.run(backend, runner, live.extend_batch(runner, (21, 5, 64)))
    assert torch.equal(results["validate"], results["off"])
    assert (results["on"] - results["off"]).abs().max() < BOUND
    assert not torch.equal(results["on"], results["off"])
    states = [backend.served for backend in probe.rank(0).backends]
    assert [[served[mode].calls for mode in ("off", "validate", "on")] for served in states] == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]


@pytest.mark.parametrize("prefixes", [(21, 5, 64), (1,)])
def test_a_decode_call_is_ours_without_a_draft_row(monkeypatch: pytest.MonkeyPatch, prefixes: tuple[int, ...]) -> None:
    results = {}
    for mode in ("off", "validate", "on"):
        start(monkeypatch, mode, *({"off", "on"} - {mode}))
        with live.server(speculative_algorithm=None, speculative_num_draft_tokens=None):
            runner = live.make_runner(len(prefixes), speculative=False)
            backend = attention_registry.ATTENTION_BACKENDS["treeverify"](runner)
            results[mode] = live.run(backend, runner, live.decode_batch(runner, prefixes))
    assert torch.equal(results["validate"], results["off"])
    assert (results["on"] - results["off"]).abs().max() < BOUND
    assert not torch.equal(results["on"], results["off"])
    _, validated, _ = probe.rank(0).backends
    assert validated.layers[0].rows == len(prefixes) * live.HEADS
    assert validated.layers[0].max_abs < BOUND


def test_a_plugin_algorithm_without_a_verify_input_is_refused_at_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own function for the captured verify input, asked for an algorithm that is a plugin."""
    from sglang.srt.speculative.spec_info import create_dummy_verify_input
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    start(monkeypatch, "off", "on")
    with live.server():
        runner = live.make_runner(4)
        backend = attention_registry.ATTENTION_BACKENDS["treeverify"](runner)
        backend.init_cuda_graph_state(4, 4 * live.NODES)
        mask = backend.verify_mask.buffer[: 4 * live.NODES * (1 + live.NODES)]
        batch = live.verify_batch(runner, (1,) * 4)
        batch.spec_info = create_dummy_verify_input(runner.spec_algorithm, mask, live.NODES, False)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)  # built in: it has a mask
        backend.forward_metadata = replace(backend.forward_metadata, custom_mask=None)  # as an eager call leaves it
        backend.init_forward_metadata_out_graph(batch)
        backend._masked_graphs = False  # as captured for a chain
        with pytest.raises(ConfigError, match="no mask; verify input EagleVerifyInput"):
            backend.init_forward_metadata_out_graph(batch)
        batch.spec_info = create_dummy_verify_input(CustomSpecAlgo("X", None), mask, live.NODES, False)
        assert batch.spec_info is None
        with pytest.raises(ConfigError, match=r"get_spec_info and spec_info\.create_dummy_verify_input"):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_the_modes_have_graphs_of_their_own_in_sglangs_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's full-graph backend with a stand-in for the CUDA graph: what the capture returns is what it replays."""
    from sglang.srt.model_executor.runner.shape_key import ShapeKey
    from sglang.srt.model_executor.runner_backend import full_cuda_graph_backend as full

    start(monkeypatch, "off", "on")
    _install()
    nothing = contextlib.nullcontext
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None, reset=lambda: None))
    for name in ("graph_pool_capture_scope", "graph_pool_replay_scope"):
        monkeypatch.setattr(full, name, nothing)
    graph = object.__new__(full.FullCudaGraphBackend)
    graph.__dict__ |= {
        "_graphs": {},
        "_outputs": {},
        "_pool": None,
        "_capture_stream": None,
        "_memory_saver_adapter": None,
        "_reuse_output_buffer": False,
        "_cuda_graph_runner": None,
        "_tp_group": SimpleNamespace(barrier=lambda: None),
        "_precarve": SimpleNamespace(measure=nothing, mint=lambda: None),
        "_device_module": SimpleNamespace(synchronize=lambda: None, graph=lambda **_: nothing()),
    }
    switch = modes.current()
    graph.capture_one(ShapeKey(size=8), lambda: switch.ask(graph))
    counted: list[int] = []
    graph.served_off, graph.facts = counted.append, SimpleNamespace(nodes=3)
    assert set(graph._graphs) == {ShapeKey(size=8), ShapeKey(size=8, variant_label="@on")}
    assert graph.replay(ShapeKey(size=8), None) == "off"
    narrow = SimpleNamespace(batch_size=5, spec_info=SimpleNamespace(draft_token_num=2))
    assert graph.replay(ShapeKey(size=8), narrow) == "off"
    with switch.capture(VerifyMode.OFF):
        assert graph.replay(ShapeKey(size=8), narrow) == "off"
    assert counted == [8 * 3, 5 * 2]  # a rehearsal is nobody's
    switch.change(VerifyMode.ON, 1)
    assert graph.replay(ShapeKey(size=8), None) == "on"


def test_the_servers_info_carries_the_report_and_the_switch_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.managers.scheduler import Scheduler

    start(monkeypatch, "off", "on")
    _install()
    group = object()
    monkeypatch.setattr(dist, "get_world_size", lambda _: 1)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "all_gather_object", lambda into, value, group: into.__setitem__(0, value))
    scheduler = SimpleNamespace(
        forward_ct=7,
        server_args=SimpleNamespace(),
        tp_cpu_group=group,
        internal_state=SimpleNamespace(get_internal_state=lambda _: SimpleNamespace(internal_state={})),
    )
    request = SetInternalStateReq(server_args={"treeverify_mode": 2})
    assert Scheduler.set_internal_state(scheduler, request).updated is True
    answer = Scheduler.get_internal_state(scheduler, None).internal_state["treeverify"]
    state = PluginState.model_validate_json(json.dumps(answer))
    assert state.engine == "sglang 0.5.23"
    assert (state.ranks[0].mode, state.ranks[0].switches, state.ranks[0].switched_at) == (VerifyMode.ON, 1, 7)
    request = SetInternalStateReq(server_args={"treeverify_mode": 1})
    assert Scheduler.set_internal_state(scheduler, request).updated is False
    assert modes.current().mode is VerifyMode.ON


def test_sglang_lets_numbers_through_and_no_words() -> None:
    """What its HTTP route makes of a body: the reason why a mode is sent as a number."""
    from pydantic import TypeAdapter, ValidationError
    from sglang.srt.managers.io_struct import SetInternalStateReq

    body = TypeAdapter(SetInternalStateReq)
    assert body.validate_python({"server_args": {"treeverify_mode": 2}}).server_args == {"treeverify_mode": 2}
    with pytest.raises(ValidationError):
        body.validate_python({"server_args": {"treeverify_mode": "on"}})
