"""The drafter's attention backend where none is named: chosen as SGLang would, and told."""

from __future__ import annotations

import logging
import re
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from treeverify.integrations.sglang.ddtree import draft_backend, plugin
from treeverify.integrations.sglang.ddtree.draft_backend import Facts, choose

HOPPER = Facts(cuda=True, hopper=True, fa3=True, flashinfer=True, head_dim=128, dtype="bfloat16")
OTHER = HOPPER._replace(hopper=False, fa3=False)


@pytest.mark.parametrize(
    ("facts", "backend", "why"),
    [
        (HOPPER, "fa3", "sm_90"),
        (HOPPER._replace(fa3=False), "flashinfer", "sgl_kernel.flash_ops is not installed"),
        (HOPPER._replace(fa3=False, flashinfer=False), "triton", "neither sgl_kernel.flash_ops nor flashinfer is"),
        (HOPPER._replace(flashinfer=False), "fa3", "sm_90"),
        (HOPPER._replace(dtype="auto", head_dim=64), "fa3", "sm_90"),
        (OTHER, "flashinfer", "SGLang's choice on this GPU"),
        (OTHER._replace(fa3=True), "flashinfer", "SGLang's choice on this GPU"),
        (OTHER._replace(flashinfer=False), "triton", "no flashinfer is installed"),
        (HOPPER._replace(head_dim=80), "triton", r"heads of 80 are none of \(64, 128, 256\)"),
        (OTHER._replace(dtype="float32"), "triton", "dtype float32 is not of 16 bits"),
        (OTHER._replace(cuda=False), "triton", "without a GPU"),
    ],
)
def test_the_choice(facts: Facts, backend: str, why: str) -> None:
    chosen = choose(facts)
    assert chosen.backend == backend
    assert re.search(why, chosen.why)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """What this machine's SGLang says of it."""
    said = {"is_hopper_with_cuda_12_3": False, "is_flashinfer_available": False, "flash_ops": False}
    monkeypatch.setattr(draft_backend, "find", lambda path: lambda: said[path.split(".")[-1]])
    monkeypatch.setattr(draft_backend, "find_spec", lambda _: ModuleType("found") if said["flash_ops"] else None)
    return said


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"device": "cuda", "dtype": "auto"} | changes)


CONFIG = SimpleNamespace(head_dim=None, hidden_size=1024, num_attention_heads=8)


def test_what_is_chosen_is_told(machine: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    machine["is_flashinfer_available"] = True
    assert draft_backend.default(arguments(), CONFIG) == "flashinfer"
    machine |= {"is_hopper_with_cuda_12_3": True, "flash_ops": True}
    assert draft_backend.default(arguments(), CONFIG) == "fa3"
    assert [record.getMessage() for record in caplog.records] == [
        "treeverify: the drafter's attention is flashinfer: SGLang's choice on this GPU",
        "treeverify: the drafter's attention is fa3: SGLang's choice on sm_90",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_triton_on_a_gpu_is_warned_of(machine: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert draft_backend.default(arguments(), CONFIG) == "triton"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "triton: no flashinfer is installed; it reads a prefix serially" in record.getMessage()
    assert "--speculative-draft-window-size" in record.getMessage()
    caplog.clear()
    assert draft_backend.default(arguments(device="cpu"), CONFIG) == "triton"
    assert caplog.records[0].levelno == logging.INFO


def test_a_kernel_package_that_is_not_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not draft_backend._installed("no_such_package.flash_ops")
    assert draft_backend._installed("importlib.util")


@pytest.mark.parametrize("named", [None, "fa4"])
def test_the_command_line_s_choice_stays(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(speculative_draft_attention_backend=named)
    monkeypatch.setattr(plugin.algorithm, "fill", lambda *_: None)
    monkeypatch.setattr(plugin, "_read_block", lambda _: 8)
    monkeypatch.setattr(plugin.compat, "draft_config", lambda _: CONFIG)
    monkeypatch.setattr(plugin.draft_backend, "default", lambda *_: "chosen")
    plugin._fill(given)
    assert given.speculative_draft_attention_backend == (named or "chosen")
