"""Addresses, inherited settings, and the process: what it listens on, how it ends, what its log says."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from treeverify.errors import ConfigError
from treeverify.serve.server import _bind, _place

LONG = {"max_new_tokens": None, "temperature": 0, "ignore_eos": True}


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("127.0.0.1", "127.0.0.1:80"),
        ("localhost", "localhost:80"),
        ("::1", "[::1]:80"),
        ("[::1]", "[::1]:80"),
        ("::", "[::]:80"),
        ("2001:db8::7", "[2001:db8::7]:80"),
    ],
)
def test_an_address_is_written_as_a_url_has_it(host, place):
    assert _place(host, 80) == place
    assert httpx.URL(f"http://{place}/").host == host.strip("[]")


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("localhost", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        pytest.param("::1", ["::1"], marks=ipv6),
        pytest.param("[::1]", ["::1"], marks=ipv6),
        pytest.param("::", ["::1", "127.0.0.1"], marks=ipv6),
    ],
)
def test_what_it_listens_on_can_be_reached(host, reached):
    with _bind(host, 0) as listener:
        for address in reached:
            socket.create_connection((address, listener.getsockname()[1])).close()


@pytest.mark.parametrize(
    ("host", "port", "place"),
    [
        ("no.such.host.invalid", 1, "no.such.host.invalid:1"),
        ("2001:db8::7", 1, "[2001:db8::7]:1"),
        ("127.0.0.1", 70000, "127.0.0.1:70000"),
        ("caf\udce9", 1, "caf\udce9:1"),
        ("a" * 70 + ".b", 1, "a" * 70 + ".b:1"),
    ],
)
def test_an_address_that_cannot_be_had_is_one_line(host, port, place):
    with pytest.raises(ConfigError, match=r"cannot be bound: ") as refused:
        _bind(host, port)
    assert str(refused.value).startswith(f"{place}: ")


@ipv6
def test_a_taken_ipv6_port_is_named_with_brackets():
    with _bind("::1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            _bind("::1", port)
    assert str(refused.value).startswith(f"[::1]:{port}: cannot be bound: ")


@pytest.mark.parametrize("name", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
@pytest.mark.parametrize("exists", [True, False])
def test_the_folder_of_another_servers_metrics_is_left_alone(tmp_path, name, exists):
    folder = tmp_path / "metrics"
    if exists:
        folder.mkdir()
    script = """
import prometheus_client
from treeverify.control.schema import PluginState, RankState
from treeverify.env import VerifyMode
from treeverify.serve.metrics import Requests
requests = Requests()
requests.done(3, 0.5)
mode = VerifyMode.OFF
rank = RankState(rank=0, pid=1, mode=mode, allowed=[mode], switches=0, switched_at=-1, backends=[])
print(requests.exposition(PluginState(version="0", engine="embedded", ranks=[rank])).decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {name: str(folder)}, capture_output=True, text=True, check=True
    )
    assert "treeverify_generated_tokens_total 3.0" in done.stdout
    assert "treeverify_request_seconds_sum 0.5" in done.stdout
    assert 'treeverify_mode{group="0",mode="off",rank="0"} 1.0' in done.stdout
    assert folder.exists() == exists
    assert not exists or list(folder.iterdir()) == []


@contextmanager
def start(*arguments: str, setting: str = "") -> Iterator[subprocess.Popen[str]]:
    """A server process, killed in the end; ``setting`` is Python run before it."""
    script = f"import sys\nfrom treeverify.serve import server\n{setting}\nfrom treeverify.cli.main import main\nmain()"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("KDTREE", "TREEVERIFY_FAULT"))}
    with subprocess.Popen(
        [sys.executable, "-c", script, "serve", *arguments], stderr=subprocess.PIPE, text=True, env=clean
    ) as server:
        try:
            yield server
        finally:
            server.kill()


def url_of(server: subprocess.Popen[str]) -> str:
    """The address that the server's log names; it listens by then."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r" at (http://\S+)$", line):
            return found[1]
    raise AssertionError("the server has ended")


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=ipv6)])
def test_the_process_answers_then_ends_cleanly_on_sigterm_and_its_port_is_refused_meanwhile(host):
    with start("--host", host, "--port", "0") as server:
        url = url_of(server)
        assert httpx.get(f"{url}/health", timeout=None).status_code == 200
        with start("--host", host, "--port", str(httpx.URL(url).port)) as second:
            error = second.stderr.read()
        assert second.returncode == 2
        assert error.startswith(f"treeverify: {url.removeprefix('http://')}: cannot be bound")
        assert error.count("\n") == 1
        server.send_signal(signal.SIGTERM)
        assert server.stderr.read() == ""
        assert server.wait() == 0


@pytest.mark.slow
def test_a_request_that_outlives_the_grace_gets_503_and_the_log_has_no_traceback():
    with start("--port", "0", setting="server.GRACE = 0") as server:
        with httpx.Client(base_url=url_of(server), timeout=None) as client:
            body = {"text": "import os", "sampling_params": LONG, "stream": True}
            with client.stream("POST", "/generate", json=body) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                server.send_signal(signal.SIGTERM)
                *_, error, done = [line for line in lines if line]
        assert error == 'data: {"error": {"message": "the server is shutting down"}}'
        assert done == "data: [DONE]"
        assert server.stderr.read() == ""
        assert server.wait() == 0
