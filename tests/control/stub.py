"""A server that answers as SGLang with the plugin does, over real HTTP."""

from __future__ import annotations

import copy
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from treeverify.control.schema import RankState

LAYER: dict[str, Any] = {
    "layer": 0,
    "calls": 4,
    "rows": 512,
    "mismatched_rows": 0,
    "max_abs": 0.0078125,
    "max_row_ulp": 1.0,
    "max_relative": 0.0021,
    "worst_node": 3,
    "worst_head": 7,
    "histogram": [400, 100, 12, 0, 0, 0, 0, 0, 0, 0],
}
BACKEND: dict[str, Any] = {
    "kernel": "portable",
    "device": "cuda:0",
    "heads": 8,
    "nodes": 16,
    "bound_ulp": 2.0,
    "breaches": 0,
    "dumps": 0,
    "shapes": [{"requests": 1, "nodes": 16, "heads": 8, "mask": "torch.uint8", "modes": ["on", "validate"]}],
    "left_to_parent": {},
    "served": {
        "off": {"calls": 1, "rows": 128},
        "validate": {"calls": 4, "rows": 512},
        "on": {"calls": 7, "rows": 896},
    },
    "layers": [LAYER, {**LAYER, "layer": 1, "max_row_ulp": 0.5, "worst_node": 1}],
}


def rank(number: int = 0, **changes: Any) -> dict[str, Any]:
    base = {
        "rank": number,
        "pid": 100 + number,
        "mode": "validate",
        "allowed": ["off", "validate", "on"],
        "switches": 2,
        "switched_at": 40,
        "backends": [copy.deepcopy(BACKEND)],
    }
    return {**base, **changes}


def rank_state(number: int = 0, **changes: Any) -> RankState:
    return RankState.model_validate_json(json.dumps(rank(number, **changes)))


def state(*ranks: dict[str, Any]) -> dict[str, Any]:
    return {"version": "0.1.0", "engine": "sglang 0.5.17", "ranks": list(ranks or (rank(0), rank(1)))}


class Stub:
    """What the server answers; tests change it."""

    def __init__(self, *groups: dict[str, Any]) -> None:
        self.groups: list[Any] = [{"treeverify": group} for group in groups or (state(),)]
        self.url = ""
        self.key: str | None = None
        self.updated: list[Any] | None = None
        self.deaf_ranks = 0
        """Ranks, counted from the last one, that accept a switch and do not take it."""
        self.late_reads = 0
        """Reads after a switch that still see the old mode."""
        self.raw: dict[str, tuple[int, bytes]] = {}
        """Path: status and body, instead of the usual answer."""
        self.posts: list[Any] = []
        self.on_read: Any = None
        self._pending: str | None = None

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path in self.raw:
            return self.raw[path]
        if (method, path) == ("GET", "/server_info"):
            if self.on_read is not None:
                self.on_read(self)
            self._take()
            return 200, json.dumps({"version": "0.5.17", "internal_states": self.groups}).encode()
        if (method, path) == ("POST", "/set_internal_state"):
            self.posts.append(json.loads(body))
            number = self.posts[-1]["server_args"]["treeverify_mode"]
            self._pending = ("off", "validate", "on")[number]
            return 200, json.dumps([True] * len(self.groups) if self.updated is None else self.updated).encode()
        return 404, b'{"detail":"Not Found"}'

    def _take(self) -> None:
        if self._pending is None:
            return
        if self.late_reads:
            self.late_reads -= 1
            return
        ranks = [rank for group in self.groups for rank in group["treeverify"]["ranks"]]
        for taking in ranks[: len(ranks) - self.deaf_ranks]:
            taking["mode"] = self._pending


@contextmanager
def serving(stub: Stub, tls: ssl.SSLContext | None = None) -> Iterator[Stub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply("GET")

        def do_POST(self) -> None:
            self._reply("POST")

        def _reply(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if stub.key is not None and self.headers.get("Authorization") != f"Bearer {stub.key}":
                status, content = 401, b'{"error":"Unauthorized"}'
            else:
                status, content = stub.answer(method, self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    stub.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
