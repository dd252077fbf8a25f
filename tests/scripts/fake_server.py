"""Stands in for ``sglang.launch_server`` in a rehearsal of the live runs: the answers' form, no model.

The next token follows from a law over eight tokens that depends on the last one. FAKE_FAULT ``hot`` samples at a wrong
temperature.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import sys
import time
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ARGUMENTS = sys.argv
FAULT = os.environ.get("FAKE_FAULT", "")
MODES = ("off", "validate", "on")
PER_STEP = round(float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "4")))
SHARP = 1.5
state = {"mode": os.environ.get("KDTREE_VERIFY", "off"), "switched_at": 0, "rows": 0}
histogram: dict[int, int] = {}


def option(name: str, default: str = "") -> str:
    """Last value of a command line option."""
    found = [ARGUMENTS[n + 1] for n, word in enumerate(ARGUMENTS) if word == name]
    return found[-1] if found else default


SPECULATIVE = bool(option("--speculative-algorithm"))


def layers(model: str) -> int:
    """Attention calls of a step of this model."""
    path = Path(option(model)) / "config.json"
    return int(json.loads(path.read_text())["num_hidden_layers"]) if option(model) and path.exists() else 0


@lru_cache
def law(last: int) -> dict[int, float]:
    """Log-probabilities of the next token."""
    values = {8 + n: SHARP * math.sin(last + 2.0 * n) for n in range(8)}
    total = math.log(sum(math.exp(value) for value in values.values()))
    return {token: value - total for token, value in values.items()}


@lru_cache
def weights(last: int, temperature: float) -> tuple[list[int], list[float]]:
    """Tokens that may be drawn and their weights; one token at temperature 0."""
    found = law(last)
    if temperature == 0:
        return [max(found, key=found.__getitem__)], [1.0]
    temperature *= 1.4 if FAULT == "hot" and SPECULATIVE else 1
    return list(found), [math.exp(value / temperature) for value in found.values()]


def text(ids: list[int], sampling: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """One answer."""
    numbers = random.Random(sampling.get("sampling_seed", 1))
    found: list[int] = []
    for _ in range(sampling["max_new_tokens"]):
        found.append(numbers.choices(*weights((found or ids)[-1], sampling.get("temperature", 0)))[0])
    meta: dict[str, Any] = {"completion_tokens": len(found)}
    if SPECULATIVE:
        steps = math.ceil((len(found) - 1) / PER_STEP)
        histogram[PER_STEP] = histogram.get(PER_STEP, 0) + steps
        meta |= {"spec_verify_ct": steps, "spec_accept_length": float(PER_STEP)}
        meta["spec_correct_drafts_histogram"] = [0] * (PER_STEP - 1) + [steps]
        state["rows"] += 16 * 8 * steps
    if body.get("return_logprob"):
        meta["output_top_logprobs"] = [[[value, token, None] for token, value in law(ids[-1]).items()]]
    return {"output_ids": found, "meta_info": meta}


def generate(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers to a list of prompts, after the time that the steps of the mode take."""
    prompts, given = body["input_ids"], body["sampling_params"]
    settings = given if isinstance(given, list) else [given] * len(prompts)
    answers = [text(ids, sampling, body) for ids, sampling in zip(prompts, settings, strict=True)]
    steps = max(one["meta_info"].get("spec_verify_ct", len(one["output_ids"])) for one in answers)
    time.sleep(steps * (0.0001 if state["mode"] == "on" else 0.0003))
    return answers


def backend() -> dict[str, Any]:
    """One backend's counters."""
    layer = {"histogram": [state["rows"], 0, 0, 0], "rows": state["rows"], "mismatched_rows": 0}
    layer |= {"max_abs": 0.01, "max_row_ulp": 1.0, "max_relative": 0.001}
    served = {mode: {"calls": 1, "rows": 1} for mode in MODES}
    return {"kernel": "portable", "served": served, "left_to_parent": {}, "breaches": 0, "dumps": 0, "layers": [layer]}


def info() -> dict[str, Any]:
    """What the info query answers."""
    ranks = [
        {"rank": rank, "mode": state["mode"], "switched_at": state["switched_at"], "backends": [backend()]}
        for rank in range(int(option("--tp-size", "1")))
    ]
    counts = {str(length): count for length, count in histogram.items()}
    return {"internal_states": [{"treeverify": {"ranks": ranks}, "ddtree": {"acceptance_lengths": counts}}]}


def profile(body: dict[str, Any]) -> str:
    """Write a trace of the steps asked for by each rank: a draft graph, a verify graph, and one wait each."""
    kernel = "tree_attention_portable" if state["mode"] == "on" else "_fwd_kernel"
    kernel = "FlashAttnFwdSm90" if option("--decode-attention-backend") == "fa3" else kernel
    events: list[dict[str, Any]] = []
    for step in range(body["num_steps"]):
        begin = 1000.0 * step
        names = [(f"{begin}d", "smxx_tree_build", 0.0, 50.0)]
        names += [(f"{begin}d", "_fwd_kernel", 10.0, 1.0)] * layers("--speculative-draft-model-path")
        names += [(f"{begin}v", "fused_moe_kernel", 90.0, 1.0)]
        names += [(f"{begin}v", kernel, 100.0 + layer, 1.0) for layer in range(layers("--model-path") or 4)]
        names += [(f"{begin}a", "smxx_tree_accept", 600.0, 100.0)]
        for correlation, name, at, dur in names:
            args = {"correlation": correlation}
            events.append({"cat": "kernel", "name": name, "ts": begin + at, "dur": dur, "args": args})
        events.append({"cat": "cuda_runtime", "name": "cudaEventSynchronize", "ts": begin, "dur": 1.0})
    for rank in range(int(option("--tp-size", "1"))):
        path = Path(body["output_dir"]) / f"1-TP-{rank}.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": [] if rank else events}).encode()))
    return "Start profiling."


def switch(body: dict[str, Any]) -> list[bool]:
    """Take a mode."""
    state["mode"] = MODES[body["server_args"]["treeverify_mode"]]
    state["switched_at"] = time.monotonic_ns()
    return [True]


ANSWERS = {
    "/generate": generate,
    "/server_info": lambda _: info(),
    "/health": lambda _: None,
    "/start_profile": profile,
    "/set_internal_state": switch,
}


class Handler(BaseHTTPRequestHandler):
    """Answer in JSON."""

    def do_GET(self) -> None:
        """A request without a body."""
        self.answer({})

    def do_POST(self) -> None:
        """A request with one."""
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def answer(self, body: dict[str, Any]) -> None:
        """Send the answer."""
        data = json.dumps(ANSWERS[self.path](body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Stay quiet."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
