"""A server's control calls and made-up answers, from the standard library, so that it is up in a moment.

``stub_server.py PORT``; its mode and its live switches come from the environment as in a real one. Its counters begin
at nothing with each process, and with ``STUB_EAGER`` its verify calls have another mask, as in a real one.
``STUB_PLUGIN=0``: a server without the plugin. ``STUB_DEAD=MODE``: it ends when it is switched to, or started in, that
mode. ``STUB_BROKEN``: it answers no prompt. ``STUB_LOGPROBS=0``: it refuses log-probabilities. ``STUB_PARTS``: in mode
on its texts part at their fifth token. ``STUB_KEY``: every route wants this bearer token. ``STUB_LOCKED=PATH``: that
one wants another. ``STUB_TLS=FOLDER``: HTTPS, with ``server.pem`` and ``server.key`` there.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODES = ("off", "validate", "on")
state = {"mode": os.environ.get("KDTREE_VERIFY", "off"), "switches": 0}
allowed = os.environ.get("KDTREE_VERIFY_ALLOW", state["mode"]).split(",")
ROWS, LAYERS = 1000, 2
SHAPE = {"requests": 1, "nodes": 4, "heads": 2, "mask": "bool" if os.environ.get("STUB_EAGER") else "uint8"}
served = dict.fromkeys(MODES, 0)
plugin = os.environ.get("STUB_PLUGIN", "1") == "1"


def info() -> dict[str, object]:
    rank = {
        "rank": 0,
        "pid": os.getpid(),
        "mode": state["mode"],
        "allowed": allowed,
        "switches": state["switches"],
        "switched_at": -1,
        "backends": [backend()],
    }
    found = {"version": "0", "engine": "stub", "ranks": [rank]}
    return {"internal_states": [{"treeverify": found} if plugin else {}]}


def backend() -> dict[str, object]:
    compared = served["validate"]
    counts = {"calls": compared, "rows": compared * ROWS, "mismatched_rows": 0, "max_abs": 0.0, "max_row_ulp": 0.0}
    counts |= {"max_relative": 0.0, "worst_node": -1, "worst_head": -1, "histogram": [compared * ROWS] + [0] * 9}
    seen = [mode for mode in MODES if served[mode]]
    return {
        "kernel": "stub",
        "device": "cpu",
        "heads": SHAPE["heads"],
        "nodes": SHAPE["nodes"],
        "bound_ulp": 2.0,
        "breaches": 0,
        "dumps": 0,
        "shapes": [SHAPE | {"modes": seen}] if seen else [],
        "left_to_parent": {},
        "served": {mode: {"calls": served[mode], "rows": served[mode] * ROWS} for mode in seen},
        "layers": [{"layer": layer, **counts} for layer in range(LAYERS)] if compared else [],
    }


def generate(body: dict[str, object]) -> dict[str, object]:
    served[state["mode"]] += 1
    count = body["sampling_params"]["max_new_tokens"]
    tokens = list(range(count))
    if os.environ.get("STUB_PARTS") and state["mode"] == "on" and count > 4:
        tokens[4] = 0
    meta = {"completion_tokens": count, "spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 2]}
    if body.get("return_logprob"):
        meta["output_token_logprobs"] = [[-0.1, token, None] for token in tokens]
        others = range(1, body["top_logprobs_num"])
        meta["output_top_logprobs"] = [
            [[-0.1, token, None], *([-5.0 - other, token + other, None] for other in others)] for token in tokens
        ]
    return {"text": "", "output_ids": tokens, "meta_info": meta}


def die_if_asked() -> None:
    if os.environ.get("STUB_DEAD") == state["mode"]:
        os._exit(1)


class Handler(BaseHTTPRequestHandler):
    def parse_request(self) -> bool:
        """Read the head; refused here, whatever the method, without the key."""
        if not super().parse_request():
            return False
        locked = self.path == os.environ.get("STUB_LOCKED")
        wanted = "another" if locked else os.environ.get("STUB_KEY")
        if wanted is None or self.headers.get("Authorization") == f"Bearer {wanted}":
            return True
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, None)
        elif self.path in ("/server_info", "/get_server_info"):
            self.answer(200, info())
        else:
            self.answer(404, None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            if os.environ.get("STUB_BROKEN"):
                self.answer(500, None)
            elif body.get("return_logprob") and os.environ.get("STUB_LOGPROBS") == "0":
                self.answer(400, {"error": {"message": "return_logprob: not with this algorithm"}})
            else:
                self.answer(200, generate(body))
            return
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
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
if "STUB_TLS" in os.environ:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(f"{os.environ['STUB_TLS']}/server.pem", f"{os.environ['STUB_TLS']}/server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
