"""One client for all calls: what it trusts, which key it sends, that no proxy is asked, and what it says of each."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.control import authority
from tests.control.stub import Stub, serving

from treeverify.control import http
from treeverify.control.client import read_state, require_healthy, switch_mode
from treeverify.cutover.asking import refuses_logprobs
from treeverify.cutover.samples import Plan, Prompt
from treeverify.env import VerifyMode
from treeverify.errors import AccessError, ConfigError, ServerError, ServerUnreachableError

PLAN = Plan(prompts=[Prompt(name="a", input="x", forced="abcdefgh")], probe_tokens=2)
ANSWER = b'{"meta_info": {"completion_tokens": 2, "output_token_logprobs": [], "output_top_logprobs": []}}'
CALLS: dict[str, Callable[[str], object]] = {
    "/server_info": read_state,
    "/set_internal_state": lambda url: switch_mode(url, VerifyMode.ON),
    "/health": require_healthy,
    "/generate": lambda url: refuses_logprobs(url, PLAN),
}
STORES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def ready(*_: object) -> Stub:
    found = Stub()
    found.raw |= {"/health": (200, b""), "/generate": (200, ANSWER)}
    return found


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TREEVERIFY_API_KEY", *STORES):
        monkeypatch.delenv(name, raising=False)
    http._trust.cache_clear()
    yield
    http._trust.cache_clear()


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(ready()) as running:
        yield running


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The authority's certificate; beside its folder are the server's."""
    return authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def secure(trusted: Path) -> Iterator[Stub]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(trusted.parents[1] / "server.pem", trusted.parents[1] / "server.key")
    with serving(ready(), context) as running:
        yield running


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_trusts_what_the_environment_names(secure, trusted, monkeypatch, call, name):
    monkeypatch.setenv(name, str(trusted if name == "SSL_CERT_FILE" else trusted.parent))
    call(secure.url)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_call_trusts_another_authority(secure, call):
    with pytest.raises(AccessError, match=r"certificate verify failed.*SSL_CERT_FILE"):
        call(secure.url)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_sends_the_key(stub, monkeypatch, call):
    stub.key = "secret"
    with pytest.raises(AccessError, match=r"wants a key \(TREEVERIFY_API_KEY\)"):
        call(stub.url)
    monkeypatch.setenv("TREEVERIFY_API_KEY", "wrong-one")
    with pytest.raises(AccessError, match="wants another key than the one it got") as caught:
        call(stub.url)
    assert "wrong-one" not in str(caught.value)
    monkeypatch.setenv("TREEVERIFY_API_KEY", "secret")
    call(stub.url)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_call_asks_a_proxy(stub, monkeypatch, call):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    call(stub.url)


@pytest.mark.parametrize("key", [" secret", "secret\n", "schlüssel", "sec\tret"])
def test_a_key_that_no_header_can_carry_is_not_told(stub, key):
    with pytest.raises(ConfigError, match="TREEVERIFY_API_KEY") as caught:
        read_state(stub.url, api_key=key)
    assert key.strip() not in str(caught.value)


@pytest.mark.parametrize("status", [404, 500, 503])
def test_a_health_call_with_another_status_is_named(stub, status):
    stub.raw["/health"] = (status, b"starting")
    with pytest.raises(ServerError, match=f"/health: expected status 200, got {status}: starting"):
        require_healthy(stub.url)


def test_a_port_is_the_schemes_own_where_none_is_named():
    assert [http.port(url) for url in ("http://a:3", "http://a", "https://a")] == [3, 80, 443]
    with pytest.raises(ServerUnreachableError, match="http://HOST:PORT"):
        http.port("http://a:b")


@pytest.mark.parametrize("rest", ["x/\udce9", "x?\udce9", "u\udce9@x", "\udce9", "x:abc", "x\0", "a" * 64], ids=ascii)
def test_what_cannot_be_an_address_is_said(rest: str) -> None:
    with pytest.raises(ServerUnreachableError, match="expected an address like http://HOST:PORT"):
        read_state(f"http://{rest}")


@pytest.mark.parametrize("rest", ["x/\udce9", "x:abc"], ids=ascii)
def test_nor_has_it_a_port(rest: str) -> None:
    with pytest.raises(ServerUnreachableError, match="expected an address like http://HOST:PORT"):
        http.port(f"http://{rest}")
