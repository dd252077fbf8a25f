"""A server over the packaged model, in this process: by its application alone, or behind a socket."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import httpx
import pytest
from fastapi.testclient import TestClient

from treeverify.serve.server import Server, Setup, application, load


@pytest.fixture
def serve():
    """``serve(fault=None, allow=..., **setup)``: a client of a started server; every one is stopped at the end."""
    with pytest.MonkeyPatch.context() as patch:
        clients = []

        def start(fault: str | None = None, mode: str = "off", allow: str = "off,validate,on", **setup) -> TestClient:
            patch.setenv("KDTREE_VERIFY", mode)
            patch.setenv("KDTREE_VERIFY_ALLOW", allow)
            patch.delenv("TREEVERIFY_FAULT", raising=False)
            if fault is not None:
                patch.setenv("TREEVERIFY_FAULT", fault)
            clients.append(TestClient(application(Setup(**setup))))
            return clients[-1].__enter__()

        yield start
        for client in clients:
            client.__exit__(None, None, None)


@pytest.fixture
def live(monkeypatch):
    """``live(host)``: a server behind a socket, as a context of its address and an HTTP client for it."""
    monkeypatch.setenv("KDTREE_VERIFY", "off")
    monkeypatch.delenv("TREEVERIFY_FAULT", raising=False)
    return _live


@contextmanager
def _live():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(load(Setup()))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=None) as client:
                yield server, client
        finally:
            server.should_exit = True
            thread.join()


def ask(client, text="def parse(path):", tokens=16, **body):
    """The answer to one greedy request."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return client.post("/generate", json={"text": text, "sampling_params": sampling, **body})


def rank(client):
    """The state of the only rank."""
    return client.get("/server_info").json()["internal_states"][0]["treeverify"]["ranks"][0]


def switch(client, number):
    """Ask for a mode by its number; returns the answer's body."""
    return client.post("/set_internal_state", json={"server_args": {"treeverify_mode": number}}).json()
