"""Which calls are ours, by mode; what validate counts. No SGLang: its backend is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fakes import HEADS, NODES, call, decode, make_backend, make_layer, make_mode, make_switch, tree_mask

from treeverify.env import VerifyMode
from treeverify.errors import ConfigError, ContractError
from treeverify.integrations.sglang import attention, calls, compat
from treeverify.ops.tree_attention import cuda

OFF, ON, VALIDATE = VerifyMode.OFF, VerifyMode.ON, VerifyMode.VALIDATE


def test_on_serves_ours_and_the_parent_computes_nothing() -> None:
    backend = make_backend(ON)
    ours = call(backend)
    assert backend.served == []
    torch.testing.assert_close(ours, call(make_backend(VALIDATE)), rtol=1e-4, atol=1e-5)  # which serves the parent's


def test_validate_serves_the_parents_result_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call(make_backend(VALIDATE))
    monkeypatch.setattr(attention, "tree_attention", lambda *_, out, **__: out.fill_(7.0))
    backend = make_backend(VALIDATE)
    assert torch.equal(call(backend), expected)
    (figures,) = backend.verifier.counters.read()["layers"]
    assert figures["max_abs"] > 5
    assert figures["histogram"][-1] == figures["rows"] == 2 * NODES * HEADS


def test_validate_agrees_on_live_tensors_and_counts_each_layer() -> None:
    backend = make_backend(VALIDATE)
    for number in (0, 1, 1):
        call(backend, make_layer(layer_id=number))
    first, second = backend.verifier.counters.read()["layers"]
    assert (first["layer"], first["calls"], second["layer"], second["calls"]) == (0, 1, 1, 2)
    assert second["rows"] == 2 * 2 * NODES * HEADS
    assert first["mismatched_rows"] == 0
    assert first["max_row_ulp"] < 0.01  # float32 on both sides, counted in bfloat16 steps
    assert sum(first["histogram"]) == first["rows"]


def test_validate_catches_a_mask_that_only_ours_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = calls.extend_call
    monkeypatch.setattr(
        calls, "extend_call", lambda *arguments: stock(*arguments)._replace(mask=None, mask_indptr=None)
    )
    backend = make_backend(VALIDATE)
    call(backend)
    (figures,) = backend.verifier.counters.read()["layers"]
    assert figures["max_row_ulp"] > 8


def test_on_counts_calls_once_per_forward_pass() -> None:
    backend = make_backend(ON)
    for number in (0, 1, 0, 1):
        call(backend, make_layer(layer_id=number))
    figures = backend.verifier.counters.read()
    assert figures["layers"] == []
    assert figures["served"]["on"] == {"calls": 2, "rows": 2 * 2 * NODES * HEADS}


@pytest.mark.parametrize("mode", [ON, VALIDATE])
def test_rows_that_pad_a_graph_are_not_counted(mode: VerifyMode) -> None:
    backend = make_backend(mode)
    backend.slots[NODES:] = 0  # the second request is padding
    call(backend)
    assert backend.verifier.counters.read()["served"][mode.value]["rows"] == NODES * HEADS


def test_a_pass_of_padding_alone_is_none() -> None:
    backend = make_backend(ON)
    backend.slots[:] = 0  # as in the capture of a graph
    call(backend)
    assert backend.verifier.counters.read()["served"]["on"] == {"calls": 0, "rows": 0}


@pytest.mark.parametrize("mode", [ON, VALIDATE])
def test_other_forward_modes_stay_with_the_parent(mode: VerifyMode) -> None:
    backend = make_backend(mode)
    call(backend, mode="other")
    assert backend.served == ["parent"]
    assert backend.verifier.counters.read()["layers"] == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logit_cap": 30.0}, "logit cap"),
        ({"sliding_window_size": 128}, "sliding window"),
        ({"is_cross_attention": True}, "cross-attention"),
        ({"xai_temperature_len": 100}, "xai temperature"),
        ({"k_scale": torch.ones(1)}, "scaled KV"),
        ({"v_scale": torch.ones(1)}, "scaled KV"),
    ],
)
def test_what_is_not_computed_is_left_to_the_parent_by_name(changes: dict[str, object], reason: str) -> None:
    backend = make_backend(ON)
    call(backend, make_layer(**changes))
    assert backend.served == ["parent"]
    assert [name for name in backend.verifier.left_to_parent if reason in name]


def test_sinks_are_left_to_the_parent_by_name() -> None:
    backend = make_backend(VALIDATE)
    call(backend, sinks=torch.ones(HEADS))
    assert dict(backend.verifier.left_to_parent) == {"option sinks": 1}
    assert backend.verifier.counters.read()["layers"] == []


def test_no_scale_means_one() -> None:
    backend = make_backend(VALIDATE)
    call(backend, make_layer(scaling=None))
    assert backend.verifier.counters.read()["layers"][0]["max_row_ulp"] < 0.1


def test_the_draft_rows_are_stored_before_ours_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = []
    monkeypatch.setattr(calls, "write_kv", lambda *arguments: stored.append(arguments))
    backend = make_backend(ON)
    call(backend, save=True)
    assert len(stored) == 1
    call(backend, save=False)
    assert len(stored) == 1


def test_graph_state_reserves_the_workspace_and_older_ones_stay_alive() -> None:
    backend = make_backend(VALIDATE)
    before = backend.verifier._shadow
    backend.init_cuda_graph_state(8, 8 * NODES)
    assert backend.reserved == 8
    assert backend.verifier._shadow.shape[0] == 8 * NODES
    assert any(kept is before for kept in backend.verifier._kept)


def test_the_workspace_holds_calls_of_fewer_nodes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with 8 heads: 15 nodes run in row tiles of 40, 16 nodes in those of 32, which need less room."""
    need = {1: 16, 15: 40, 16: 32}
    monkeypatch.setattr(cuda, "workspace_bytes", lambda _, nodes, *__, **___: need.get(nodes, 0))
    facts = compat.Facts(torch.device("cuda"), 8, 16, 64, 0, 1)
    verifier = SimpleNamespace(facts=facts, kernel="portable")
    assert attention.Verifier._workspace_bytes(verifier, 4) == 40  # type: ignore[arg-type]


def test_more_nodes_than_the_server_was_started_with_is_an_error() -> None:
    backend = make_backend(ON)
    backend.forward_metadata.kv_indptr = backend.forward_metadata.kv_indptr[:2]
    backend.forward_metadata.max_extend_len = 2 * NODES
    with pytest.raises(ContractError, match="nodes: expected <= 5"):
        call(backend)


def test_off_in_a_server_that_may_switch_calls_the_parent_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: object, **__: object) -> None:
        raise AssertionError("ours ran")

    for name in ("tree_attention", "Counters.count", "Counters.record"):
        monkeypatch.setattr(f"{attention.__name__}.{name}", called)
    backend = make_backend(make_switch(OFF, ON))
    for number in (0, 1):
        call(backend, make_layer(layer_id=number))
    decode(backend)
    assert backend.served == ["parent"] * 3
    assert backend.verifier.off.model_dump() == {"calls": 2, "rows": 2 * (NODES + 1) * HEADS}  # layer 0, twice


def test_a_live_switch_takes_effect_at_the_next_call() -> None:
    switch = make_switch(OFF, VALIDATE, ON)
    backend = make_backend(switch)
    off = call(backend)
    switch.change(ON, 7)
    on = call(backend)
    switch.change(VALIDATE, 9)
    validate = call(backend)
    assert backend.served == ["parent"] * 2
    assert torch.equal(validate, off)
    assert not torch.equal(on, off)
    torch.testing.assert_close(on, off, rtol=1e-4, atol=1e-5)
    served = backend.verifier.counters.read()["served"]
    assert (served["on"]["calls"], served["validate"]["calls"], backend.verifier.off.calls) == (1, 1, 1)
    assert (switch.switches, switch.switched_at) == (2, 9)
    assert backend.verifier.shapes == {(2, NODES, HEADS, "torch.bool"): {"on", "validate"}}


@pytest.mark.parametrize("prefixes", [(7, 3), (1,), (20, 1, 9)])
def test_decode_attends_to_the_stored_rows_alone(prefixes: tuple[int, ...]) -> None:
    """The new token's row is in the pool already: given again as the draft row, it must not count twice."""
    expected = decode(make_backend(OFF, prefixes))
    on = make_backend(ON, prefixes)
    torch.testing.assert_close(decode(on), expected, rtol=1e-4, atol=1e-5)
    assert on.served == []
    torch.testing.assert_close(decode(make_backend(ON, prefixes), poison=True), expected, rtol=1e-4, atol=1e-5)
    validate = make_backend(VALIDATE, prefixes)
    assert torch.equal(decode(validate), expected)
    (figures,) = validate.verifier.counters.read()["layers"]
    assert figures["rows"] == len(prefixes) * HEADS
    assert figures["max_row_ulp"] < 0.01


def test_draft_extend_is_a_chain_of_ours_on_a_draft_and_not_on_a_target() -> None:
    results = {}
    for mode in (OFF, VALIDATE, ON):
        backend = make_backend(mode, draft=True)
        backend.forward_metadata.custom_mask = None
        results[mode] = call(backend, mode="draft_extend_v2")
        assert backend.served == ([] if mode is ON else ["parent"])
    assert torch.equal(results[VALIDATE], results[OFF])
    torch.testing.assert_close(results[ON], results[OFF], rtol=1e-4, atol=1e-5)
    target = make_backend(ON)
    call(target, mode="draft_extend_v2")
    assert target.served == ["parent"]


def test_a_drafts_own_verify_and_decode_calls_stay_with_the_parent() -> None:
    backend = make_backend(ON, draft=True)
    call(backend)
    decode(backend)
    assert backend.served == ["parent"] * 2


@pytest.mark.parametrize("mode", [ON, VALIDATE])
def test_requests_of_unequal_length_are_left_to_the_parent_by_name(mode: VerifyMode) -> None:
    backend = make_backend(mode, draft=True)
    backend.forward_metadata.max_extend_len = NODES + 1  # the longest of two, so the other has NODES - 1
    backend.forward_metadata.custom_mask = None
    call(backend, mode="draft_extend_v2")
    assert backend.served == ["parent"]
    assert dict(backend.verifier.left_to_parent) == {"requests of unequal length": 1}


def _graph(spec: object, mask: torch.Tensor | None, in_capture: bool, idle: bool = False) -> None:
    backend = make_backend(ON)
    backend.forward_metadata.custom_mask = mask
    batch = SimpleNamespace(
        forward_mode=make_mode("target_verify"),
        actual_forward_mode=make_mode("idle" if idle else "target_verify"),
        spec_info=spec,
    )
    backend.init_forward_metadata_out_graph(batch, in_capture)


def test_a_graph_that_would_verify_a_tree_as_a_chain_is_refused_by_the_functions_that_lose_its_mask() -> None:
    lost = "get_spec_info and spec_info.create_dummy_verify_input"
    with pytest.raises(ConfigError, match=lost):  # what SGLang captures for an algorithm that is a plugin
        _graph(None, None, in_capture=True)
    with pytest.raises(ConfigError, match=lost):
        _graph(SimpleNamespace(topk=4, custom_mask=None), None, in_capture=True)
    with pytest.raises(ConfigError, match=lost):  # captured without a mask, replayed with a tree
        _graph(SimpleNamespace(custom_mask=tree_mask()), None, in_capture=False)
    _graph(SimpleNamespace(topk=4, custom_mask=None), tree_mask(), in_capture=True)
    _graph(SimpleNamespace(topk=1, custom_mask=None), None, in_capture=True)  # a chain: DFLASH
    _graph(SimpleNamespace(topk=1, custom_mask=None), None, in_capture=False)
    _graph(SimpleNamespace(custom_mask=tree_mask()), None, in_capture=False, idle=True)
