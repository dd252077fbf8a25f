"""A plugin's exceptions are only logged by SGLang: ours must come back in the factory. No SGLang needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import HEADS, NODES, FakeParent, call, make_backend

from treeverify.control.schema import PluginState
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError
from treeverify.integrations.sglang import compat, hooks, modes, names, plugin, probe
from treeverify.integrations.sglang.ddtree import plugin as ddtree

TARGET, DRAFT = SimpleNamespace(is_draft_worker=False), SimpleNamespace(is_draft_worker=True)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """SGLang as far as the plugin sees it; holds what was registered and hooked."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(plugin, "_failure", None)
    monkeypatch.setattr(probe, "_served", [])
    monkeypatch.setattr(modes, "_current", None)
    monkeypatch.delenv("KDTREE_VERIFY_ALLOW", raising=False)
    monkeypatch.setattr(compat, "check_registration", lambda: None)
    monkeypatch.setattr(compat, "check", lambda: None)
    monkeypatch.setattr(compat, "register", lambda factory: seen.update(factory=factory))
    monkeypatch.setattr(hooks, "install", lambda providers: seen.update(providers=providers))
    monkeypatch.setattr(ddtree, "register", lambda: None)
    monkeypatch.setattr(probe, "_observer", None)
    monkeypatch.setattr(compat, "place", lambda runner: (0, 0))
    monkeypatch.setattr(compat, "metrics_enabled", lambda: False)
    monkeypatch.setattr(compat, "stock_backend", lambda runner: "stock")
    monkeypatch.setattr(compat, "stock_class", lambda: FakeParent)
    return seen


def test_off_is_sglangs_own_backend(registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDTREE_VERIFY", raising=False)
    plugin.activate()
    assert registered["factory"](TARGET) == "stock"
    assert registered["providers"].draft(DRAFT) is None
    state = registered["providers"].rank(3)
    assert (state.rank, state.mode, state.allowed, state.backends) == (3, VerifyMode.OFF, [VerifyMode.OFF], [])


@pytest.mark.parametrize("start", ["off", "on"])
def test_a_server_that_may_switch_gets_our_class_in_every_mode(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    monkeypatch.setenv("KDTREE_VERIFY", start)
    monkeypatch.setenv("KDTREE_VERIFY_ALLOW", "off,on")
    monkeypatch.setattr(FakeParent, "__init__", lambda self, runner: None)
    monkeypatch.setattr(compat, "refusals", lambda backend, runner, switched: iter(() if switched else ("no",)))
    monkeypatch.setattr(compat, "facts", lambda backend, runner: make_backend(VerifyMode.ON).verifier.facts)
    monkeypatch.setattr(compat, "kv_dtype", lambda backend: torch.float32)
    plugin.activate()
    backend = registered["factory"](TARGET)
    assert isinstance(backend, FakeParent)
    assert (backend.draft, backend.verifier.switch.mode) == (False, start)
    assert len(registered["providers"].rank(0).backends) == 1


def test_a_draft_that_cannot_be_served_stays_with_triton_and_says_why(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KDTREE_VERIFY", "on")
    monkeypatch.setattr(FakeParent, "__init__", lambda self, runner: None)
    monkeypatch.setattr(compat, "refusals", lambda backend, runner, switched: iter(["the model's attention is GQA"]))
    assert plugin.create_draft(DRAFT) is None
    assert "the draft stays with Triton: the model's attention is GQA" in caplog.text


def test_a_build_for_hip_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    refused = list(compat.refusals(SimpleNamespace(use_mla=False), TARGET, switched=True))
    assert refused == ["torch is a build for HIP (ROCm 7.0.51831), and the kernels are CUDA's"]


@pytest.mark.parametrize("mode", ["off", "validate", "on"])
def test_a_draft_runner_gets_sglangs_own_backend(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("KDTREE_VERIFY", mode)
    plugin.activate()
    assert registered["factory"](DRAFT) == "stock"


def test_a_bad_mode_stops_the_server(registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_VERIFY", "yes")
    plugin.activate()
    with pytest.raises(ConfigError, match="expected one of off, validate, on; got 'yes'"):
        registered["factory"](TARGET)


@pytest.mark.parametrize("allowed", ["on", "off,yes", ""])
def test_a_bad_list_of_modes_stops_the_server(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, allowed: str
) -> None:
    monkeypatch.setenv("KDTREE_VERIFY", "off")
    monkeypatch.setenv("KDTREE_VERIFY_ALLOW", allowed)
    plugin.activate()
    with pytest.raises(ConfigError, match="KDTREE_VERIFY_ALLOW: expected"):
        registered["factory"](TARGET)


def test_a_failed_registration_comes_back_in_the_factory(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise names.mismatch("sglang.x.y", "a function", "nothing")

    monkeypatch.setattr(compat, "check_registration", fail)
    plugin.activate()
    with pytest.raises(ConfigError, match=r"sglang\.x\.y: expected a function, found nothing"):
        registered["factory"](TARGET)


@pytest.mark.parametrize("mode", ["validate", "on"])
def test_a_server_that_cannot_be_served_is_refused_with_all_reasons(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("KDTREE_VERIFY", mode)
    monkeypatch.setattr(compat, "refusals", lambda *_, **__: iter(["first reason", "second reason"]))
    monkeypatch.setattr(FakeParent, "__init__", lambda self, runner: None)
    plugin.activate()
    with pytest.raises(ConfigError, match=f"KDTREE_VERIFY={mode}.*first reason; second reason"):
        registered["factory"](TARGET)


def test_the_report_is_the_schema_as_plain_values(registered: dict[str, Any]) -> None:
    backend = make_backend(VerifyMode.VALIDATE)
    call(backend)
    probe.add(backend.verifier)
    modes._current = backend.verifier.switch
    report = probe.server([probe.rank(0), probe.rank(1)])
    assert json.loads(json.dumps(report)) == report
    state = PluginState.model_validate_json(json.dumps(report))
    assert [rank.rank for rank in state.ranks] == [0, 1]
    (served,) = state.ranks[0].backends
    assert served.kernel == "split_kv"
    assert served.served["validate"].rows == served.layers[0].rows == 2 * NODES * HEADS
    assert [shape.modes for shape in served.shapes] == [["validate"]]
    assert state.engine.startswith("sglang ")


def test_names_say_what_was_expected_and_found() -> None:
    names.check_parameters("json.dumps", "obj")
    with pytest.raises(
        ConfigError, match=r"json\.dumps: expected parameters that begin with text, found obj, skipkeys"
    ):
        names.check_parameters("json.dumps", "text")
    with pytest.raises(ConfigError, match=r"json\.nothing: expected to exist, found nothing of that name"):
        names.find("json.nothing")
    with pytest.raises(ConfigError, match=r"no_such_package: expected a module, found No module named"):
        names.find("no_such_package.Thing.name")


def test_importing_the_entry_point_loads_neither_torch_nor_sglang() -> None:
    code = "import sys, treeverify.integrations.sglang.plugin; print({'torch', 'sglang'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
