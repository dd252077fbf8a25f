"""A plugin's exceptions are only logged by SGLang: ours must come back in the factory. No SGLang needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeParent, make_backend

from treeverify.env import VerifyMode
from treeverify.errors import ConfigError
from treeverify.integrations.sglang import compat, names, plugin, probe

TARGET, DRAFT = SimpleNamespace(is_draft_worker=False), SimpleNamespace(is_draft_worker=True)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """SGLang as far as the plugin sees it; holds what was registered and hooked."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(plugin, "_failure", None)
    monkeypatch.setattr(probe, "_served", [])
    monkeypatch.setattr(compat, "check_registration", lambda: None)
    monkeypatch.setattr(compat, "check", lambda: None)
    monkeypatch.setattr(compat, "register", lambda factory: seen.update(factory=factory))
    monkeypatch.setattr(compat, "install_hooks", lambda report: seen.update(report=report))
    monkeypatch.setattr(compat, "stock_backend", lambda runner: "stock")
    monkeypatch.setattr(compat, "stock_class", lambda: FakeParent)
    return seen


def test_off_is_sglangs_own_backend(registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDTREE_VERIFY", raising=False)
    plugin.activate()
    assert registered["factory"](TARGET) == "stock"
    assert registered["report"]()["mode"] == "off"


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
    monkeypatch.setattr(compat, "refusals", lambda backend, runner: iter(["first reason", "second reason"]))
    monkeypatch.setattr(FakeParent, "__init__", lambda self, runner: None)
    plugin.activate()
    with pytest.raises(ConfigError, match=f"KDTREE_VERIFY={mode}.*first reason; second reason"):
        registered["factory"](TARGET)


def test_report_is_made_of_plain_values(registered: dict[str, Any]) -> None:
    probe.add(make_backend(VerifyMode.VALIDATE).verifier)
    report = probe.report()
    assert (report["mode"], report["backends"][0]["kernel"]) == ("validate", "split_kv")
    assert json.loads(json.dumps(report)) == report


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
