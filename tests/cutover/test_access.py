"""Keys, trust and routes: what a cutover needs on its way and on the way back is tried before anything is touched."""

from __future__ import annotations

import pytest
from tests.control import authority
from tests.cutover.test_bad_input import refuse, snapshot

from treeverify.control import http

ROUTES = ["/server_info", "/health", "/set_internal_state", "/generate"]
WITHOUT = "--without-logprobs"


@pytest.fixture
def keyed(bench, monkeypatch):
    """A server all of whose routes want a key, and a shell that has it."""
    bench.base["STUB_KEY"] = "secret"
    monkeypatch.setenv("TREEVERIFY_API_KEY", "secret")
    return bench


KEY = {"env": {"TREEVERIFY_API_KEY": "secret"}}


@pytest.mark.parametrize("closed", [None, "validate", "soak", "on"])
def test_a_server_that_wants_the_key_on_every_route(keyed, closed):
    keyed.boot()
    outcome = keyed.run("on", closed=closed, **KEY)
    assert outcome.code == (20 if closed else 0), outcome.out
    assert keyed.modes() == (("off", "off") if closed else ("on", "on"))
    if closed is None:
        assert keyed.rollback(**KEY).code == 0
        assert keyed.modes() == ("off", "off")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("more", [(), ("--dry-run",), (WITHOUT,)])
def test_a_route_that_refuses_the_key_is_told_before_anything_is_touched(keyed, route, more):
    keyed.base["STUB_LOCKED"] = route
    keyed.boot()
    outcome = keyed.run("on", *more, **KEY, closed="real")
    refuse(keyed, outcome, 12, route, "status 401", "TREEVERIFY_API_KEY")
    assert not keyed.state.exists()
    assert not keyed.owned.exists()


@pytest.mark.parametrize("left", ["done", "cut off"])
def test_a_shell_without_the_key_changes_nothing_and_waits_for_nothing(keyed, left):
    keyed.boot()
    kill = {"kill": "after:5"} if left == "cut off" else {}
    assert keyed.run("on", **KEY, **kill).code == (-9 if kill else 0)
    before = snapshot(keyed)
    for outcome in (keyed.rollback(), keyed.run("on")):
        refuse(keyed, outcome, 12, "status 401")
    assert snapshot(keyed) == before
    assert keyed.rollback(**KEY).code == 0
    assert keyed.modes() == ("off", "off")


@pytest.mark.parametrize("closed", [None, "on"])
def test_a_server_with_a_certificate_of_a_private_authority(bench, tmp_path, monkeypatch, closed):
    trusted = authority.make(tmp_path)
    bench.base["STUB_TLS"] = str(tmp_path)
    bench.url = f"https://localhost:{bench.port}"
    bench.boot()
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    http._trust.cache_clear()
    refuse(bench, bench.run("on"), 12, "certificate verify failed")
    assert not bench.state.exists()
    trust = {"env": {"SSL_CERT_FILE": str(trusted)}}
    real = bench.run("validate", WITHOUT, **trust, closed="real", page=False)  # real requests; too few rows
    assert real.code == 20, real.out
    assert "parity" in real.last
    assert "requests failed" not in real.out
    assert bench.modes() == ("off", "off")
    outcome = bench.run("on", **trust, closed=closed)
    assert outcome.code == (20 if closed else 0), outcome.out
    assert bench.modes() == (("off", "off") if closed else ("on", "on"))
    monkeypatch.undo()
    http._trust.cache_clear()
