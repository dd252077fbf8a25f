"""The client against a server that answers over HTTP: every way in which an answer can be wrong is a typed error."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from tests.control.stub import Stub, rank, serving, state
from tests.ports import free_port

from treeverify.control import client
from treeverify.control.client import read_state, switch_mode
from treeverify.env import VerifyMode
from treeverify.errors import PluginMissingError, ServerError, ServerUnreachableError, SwitchError

OFF, VALIDATE, ON = VerifyMode


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREEVERIFY_API_KEY", raising=False)
    monkeypatch.setattr(client, "SETTLE_S", 0.3)
    monkeypatch.setattr(client, "_PAUSE_S", 0.01)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(Stub(state(rank(0), rank(1)), state(rank(0), rank(1)))) as running:
        yield running


def test_every_group_and_rank_is_read(stub: Stub) -> None:
    states = read_state(stub.url + "/")
    assert [[rank.rank for rank in group.ranks] for group in states] == [[0, 1], [0, 1]]
    first = states[0].ranks[0]
    assert (first.mode, first.allowed) == (VALIDATE, [OFF, VALIDATE, ON])
    assert first.backends[0].layers[0].worst_head == 7
    assert states[0].engine == "sglang 0.5.17"


def test_a_closed_port_is_unreachable() -> None:
    with pytest.raises(ServerUnreachableError, match=r"/server_info: .*refused"):
        read_state(f"http://127.0.0.1:{free_port()}")


def test_a_server_that_does_not_answer_in_time_is_unreachable() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ServerUnreachableError, match=r"no answer within 0\.05 s"):
            read_state(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "", "http://"])
def test_an_address_of_another_form_is_named(url: str) -> None:
    with pytest.raises(ServerUnreachableError, match="http://HOST:PORT"):
        read_state(url)


def test_proxies_of_the_environment_are_not_used(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert len(read_state(stub.url)) == 2


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>hello</html>", "expected JSON, got <html>hello"),
        (200, b'{"status": "ok"}', "another kind of server"),
        (200, b"[]", "another kind of server"),
        (200, b'{"internal_states": []}', "another kind of server"),
        (200, b'{"internal_states": {}}', "another kind of server"),
        (404, b'{"detail":"Not Found"}', "expected status 200, got 404"),
        (500, b"x" * 10_000, "expected status 200, got 500: x{200}\\.\\.\\.$"),
    ],
)
def test_another_kind_of_server_is_told_apart(stub: Stub, status: int, body: bytes, message: str) -> None:
    stub.raw["/server_info"] = (status, body)
    with pytest.raises(ServerError, match=message) as caught:
        read_state(stub.url)
    assert type(caught.value) is ServerError


@pytest.mark.parametrize("entry", [{"other": 1}, {}, None, "text"])
def test_a_group_without_the_plugin_is_named(stub: Stub, entry: object) -> None:
    stub.groups[1] = entry
    with pytest.raises(PluginMissingError, match=r"no internal_states\[1\]\.treeverify"):
        read_state(stub.url)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda s: s.pop("version"), r"internal_states\[0\]\.treeverify\.version: Field required"),
        (lambda s: s.update(extra=1), r"\.treeverify\.extra: Extra inputs"),
        (lambda s: s.update(ranks=[]), r"\.treeverify\.ranks: "),
        (lambda s: s["ranks"][1].update(mode="maybe"), r"\.ranks\[1\]\.mode: .*got maybe"),
        (lambda s: s["ranks"][1]["allowed"].append("maybe"), r"\.ranks\[1\]\.allowed\[3\]: "),
        (lambda s: s["ranks"][0].update(switches="2"), r"\.ranks\[0\]\.switches: "),
        (lambda s: s["ranks"][0]["backends"][0].update(breaches=-1), r"\.backends\[0\]\.breaches: "),
        (lambda s: s["ranks"][0]["backends"][0]["layers"][1].update(max_abs=None), r"\.layers\[1\]\.max_abs: .*null"),
        (lambda s: s["ranks"][0]["backends"][0]["served"].update(on=None), r"\.served\.on: "),
    ],
)
def test_a_field_that_does_not_fit_is_named(stub: Stub, change: object, field: str) -> None:
    change(stub.groups[0]["treeverify"])  # type: ignore[operator]
    with pytest.raises(ServerError, match=field) as caught:
        read_state(stub.url)
    assert type(caught.value) is ServerError


@pytest.mark.parametrize("mode", [OFF, VALIDATE, ON])
def test_a_switch_is_asked_for_by_number_and_read_back(stub: Stub, mode: VerifyMode) -> None:
    states = switch_mode(stub.url, mode)
    assert stub.posts == [{"server_args": {"treeverify_mode": {OFF: 0, VALIDATE: 1, ON: 2}[mode]}}]
    assert {rank.mode for group in states for rank in group.ranks} == {mode}


def test_a_switch_that_takes_a_moment_is_waited_for(stub: Stub) -> None:
    stub.late_reads = 2
    assert {rank.mode for group in switch_mode(stub.url, ON) for rank in group.ranks} == {ON}
    assert stub.late_reads == 0


def test_a_rank_that_does_not_follow_is_named(stub: Stub) -> None:
    stub.deaf_ranks = 1
    with pytest.raises(SwitchError, match=r"later group 1, rank 1: validate$"):
        switch_mode(stub.url, ON)


@pytest.mark.parametrize("updated", [[False, True], [True, False], [], [1, True], "ok", None])
def test_a_refused_switch_is_an_error(stub: Stub, updated: object) -> None:
    stub.raw["/set_internal_state"] = (200, json.dumps(updated).encode())
    with pytest.raises(SwitchError, match="expected true for each group"):
        switch_mode(stub.url, ON)


def test_a_mode_that_is_not_allowed_is_not_even_asked_for(stub: Stub) -> None:
    stub.groups[1]["treeverify"]["ranks"][1]["allowed"] = ["off", "validate"]
    with pytest.raises(SwitchError, match=r"group 1, rank 1 allows off, validate \(KDTREE_VERIFY_ALLOW\), not on"):
        switch_mode(stub.url, ON)
    assert stub.posts == []


def test_a_server_that_wants_a_key_gets_it(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.key = "secret"
    with pytest.raises(ServerError, match="TREEVERIFY_API_KEY") as caught:
        read_state(stub.url)
    assert "secret" not in str(caught.value)
    assert len(read_state(stub.url, api_key="secret")) == 2
    monkeypatch.setenv("TREEVERIFY_API_KEY", "secret")
    assert len(switch_mode(stub.url, ON)) == 2
