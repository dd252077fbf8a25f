"""A server's control calls and nothing else, from the standard library, so that it is up in a moment.

``stub_server.py PORT``; its mode and its live switches come from the environment as in a real one. ``STUB_PLUGIN=0``:
a server without the plugin. ``STUB_DEAD=MODE``: it ends when it is switched to, or started in, that mode.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODES = ("off", "validate", "on")
state = {"mode": os.environ.get("KDTREE_VERIFY", "off"), "switches": 0}
allowed = os.environ.get("KDTREE_VERIFY_ALLOW", state["mode"]).split(",")
plugin = os.environ.get("STUB_PLUGIN", "1") == "1"


def info() -> dict[str, object]:
    rank = {
        "rank": 0,
        "pid": os.getpid(),
        "mode": state["mode"],
        "allowed": allowed,
        "switches": state["switches"],
        "switched_at": -1,
        "backends": [],
    }
    found = {"version": "0", "engine": "stub", "ranks": [rank]}
    return {"internal_states": [{"treeverify": found} if plugin else {}]}


def die_if_asked() -> None:
    if os.environ.get("STUB_DEAD") == state["mode"]:
        os._exit(1)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, None)
        elif self.path in ("/server_info", "/get_server_info"):
            self.answer(200, info())
        else:
            self.answer(404, None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = body.get("server_args", {}).get("treeverify_mode")
        if self.path != "/set_internal_state" or not plugin or MODES[int(number)] not in allowed:
            self.answer(400, {"error": {"message": "refused"}})
            return
        state["mode"], state["switches"] = MODES[int(number)], state["switches"] + 1
        die_if_asked()
        self.answer(200, [True])

    def answer(self, code: int, value: object) -> None:
        content = b"" if value is None else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


die_if_asked()
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
