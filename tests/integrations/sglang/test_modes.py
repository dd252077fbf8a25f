"""Which calls are ours, by mode; what validate counts. No SGLang: its backend is a stand-in."""

from __future__ import annotations

import pytest
import torch
from fakes import HEADS, NODES, call, make_backend, make_layer

from treeverify.env import VerifyMode
from treeverify.errors import ContractError
from treeverify.integrations.sglang import attention, compat

ON, VALIDATE = VerifyMode.ON, VerifyMode.VALIDATE


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
    (figures,) = backend.verifier.counters.read()
    assert figures["max_abs"] > 5
    assert figures["histogram"][-1] == figures["rows"] == 2 * NODES * HEADS


def test_validate_agrees_on_live_tensors_and_counts_each_layer() -> None:
    backend = make_backend(VALIDATE)
    for number in (0, 1, 1):
        call(backend, make_layer(layer_id=number))
    first, second = backend.verifier.counters.read()
    assert (first["layer"], first["calls"], second["layer"], second["calls"]) == (0, 1, 1, 2)
    assert second["rows"] == 2 * 2 * NODES * HEADS
    assert first["mismatched_rows"] == 0
    assert first["max_row_ulp"] < 0.01  # float32 on both sides, counted in bfloat16 steps
    assert sum(first["histogram"]) == first["rows"]


def test_validate_catches_a_mask_that_only_ours_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = compat.verify_call
    monkeypatch.setattr(
        compat, "verify_call", lambda *arguments: stock(*arguments)._replace(mask=None, mask_indptr=None)
    )
    backend = make_backend(VALIDATE)
    call(backend)
    (figures,) = backend.verifier.counters.read()
    assert figures["max_row_ulp"] > 8


def test_on_counts_calls_once_per_forward_pass() -> None:
    backend = make_backend(ON)
    for number in (0, 1, 0, 1):
        call(backend, make_layer(layer_id=number))
    (figures,) = backend.verifier.counters.read()
    assert (figures["layer"], figures["calls"], figures["rows"]) == (0, 2, 2 * 2 * NODES * HEADS)


@pytest.mark.parametrize("mode", [ON, VALIDATE])
def test_rows_that_pad_a_graph_are_not_counted(mode: VerifyMode) -> None:
    backend = make_backend(mode)
    backend.slots[NODES:] = 0  # the second request is padding
    call(backend)
    assert backend.verifier.counters.read()[0]["rows"] == NODES * HEADS


@pytest.mark.parametrize("mode", [ON, VALIDATE])
def test_other_forward_modes_stay_with_the_parent(mode: VerifyMode) -> None:
    backend = make_backend(mode)
    call(backend, verify=False)
    assert backend.served == ["parent"]
    assert backend.verifier.counters.read() == []


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
    assert backend.verifier.counters.read() == []


def test_no_scale_means_one() -> None:
    backend = make_backend(VALIDATE)
    call(backend, make_layer(scaling=None))
    assert backend.verifier.counters.read()[0]["max_row_ulp"] < 0.1


def test_the_draft_rows_are_stored_before_ours_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = []
    monkeypatch.setattr(compat, "write_kv", lambda *arguments: stored.append(arguments))
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


def test_more_nodes_than_the_server_was_started_with_is_an_error() -> None:
    backend = make_backend(ON)
    backend.forward_metadata.max_extend_len = 2 * NODES
    with pytest.raises(ContractError, match="nodes: expected <= 5"):
        call(backend)
