"""Live SGLang servers in modes off, validate and on: same tokens, validate's counters, tokens per second.

Run by sglang_live.sh on a GPU. Starts the packaged model with NGRAM (a tree of 16), eager and with CUDA graphs, one
server per mode, all at once, and one more with a bad KDTREE_VERIFY, which must not come up. Tokens of ``validate`` and
``on`` may differ from those of ``off`` only where the two candidates' log probabilities nearly tie (batches form by
arrival, so ``validate`` may meet one as well). Writes sglang_live.json and logs.tar.gz; exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "src/treeverify/assets"
MODES, KINDS = ("off", "validate", "on"), ("eager", "graph")
NEAR_TIE = 0.25
"""Nats between the two candidates at a first divergence: logits are bfloat16, of magnitude 16 to 32 here, whose spacing
is 0.125; each side may round by half of it, and the hidden states behind them as well."""
COMMON = shlex.split(
    "--host 127.0.0.1 --attention-backend treeverify --skip-tokenizer-init --sampling-backend pytorch "
    "--grammar-backend none --dtype bfloat16 --context-length 4096 --max-total-tokens 40000 --max-running-requests 8 "
    "--mem-fraction-static 0.7 --disable-radix-cache --skip-server-warmup --random-seed 1 --mm-feature-transport cpu "
    "--sleep-on-idle --log-level info --speculative-algorithm NGRAM --speculative-num-draft-tokens 16 "
    "--speculative-ngram-max-bfs-breadth 4 --cuda-graph-backend-prefill disabled"
)
BY_KIND = {
    "eager": ["--cuda-graph-backend-decode", "disabled"],
    "graph": ["--cuda-graph-bs-decode", "1", "2", "4", "8"],
}
ENVIRONMENT = {
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Server:
    """One server process."""

    def __init__(self, name: str, mode: str, kind: str, port: int, folder: Path) -> None:
        self.name, self.mode, self.port = name, mode, port
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(ASSETS / "target")]
        command += ["--port", str(port), "--nccl-port", str(port + 7), *COMMON, *BY_KIND[kind]]
        environment = os.environ | ENVIRONMENT | {"KDTREE_VERIFY": mode}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=folder
            )

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = 90) -> Any:
        """Send one request and return the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read() or b"null")

    def generate(self, ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy continuation of ``ids``."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return self.ask("/generate", {"input_ids": ids, "sampling_params": parameters, **more})

    def wait(self, until: float) -> bool:
        """Wait until the server is up; False if it died or the time is over."""
        while time.time() < until and self.process.poll() is None:
            try:
                self.ask("/health", timeout=2)
            except (OSError, urllib.error.URLError, ValueError):
                time.sleep(0.5)
            else:
                return True
        return False

    def stop(self) -> None:
        """Kill the server and its processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def batch(server: Server, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Continue all prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: server.generate(ids, tokens), prompts))


def warm(server: Server, prompts: list[list[int]], long: list[int]) -> bool:
    """Send the first requests, which compile Triton's kernels; False if one fails."""
    try:
        batch(server, prompts, 8)
        server.generate(long, 8)
    except (OSError, ValueError) as error:
        print(f"{server.name}: {error}")
        return False
    return True


def gap(server: Server, ids: list[int], candidates: tuple[int, int]) -> float | None:
    """Difference of the two candidates' log probabilities after ``ids``, None if the server does not say."""
    try:
        meta = server.generate(ids, 1, return_logprob=True, top_logprobs_num=8)["meta_info"]
        found = {token: value for value, token, *_ in meta["output_top_logprobs"][0]}
        return abs(found[candidates[0]] - found[candidates[1]])
    except (OSError, KeyError, IndexError, TypeError, ValueError):
        return None


def divergences(
    judge: Server, prompts: list[list[int]], expected: list[list[int]], got: list[list[int]]
) -> list[dict[str, Any]]:
    """First difference of each prompt's tokens, with the gap of the two candidates."""
    found = []
    for number, (ids, want, have) in enumerate(zip(prompts, expected, got, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), None)
        if at is not None:
            pair = (want[at], have[at])
            near = gap(judge, ids + want[:at], pair)
            found.append({"prompt": number, "position": at, "tokens": pair, "gap": near, "bound": NEAR_TIE})
    return found


def speed(server: Server, prompt: list[int], tokens: int) -> dict[str, float]:
    """Tokens per second after the prefill, and the accepted tokens per step, of one request."""
    begin = time.perf_counter()
    server.generate(prompt, 1)
    prefill = time.perf_counter() - begin
    begin = time.perf_counter()
    meta = server.generate(prompt, tokens)["meta_info"]
    seconds = time.perf_counter() - begin - prefill
    return {"tokens_per_second": (tokens - 1) / seconds, "accept": meta.get("spec_accept_length") or 0.0}


def summary(probe: dict[str, Any]) -> dict[str, Any]:
    """Fold the layers of one server's report."""
    layers = [layer for backend in probe["backends"] for layer in backend["layers"]]
    histogram = [sum(column) for column in zip(*(layer["histogram"] for layer in layers), strict=True)]
    return {
        "layers": len(layers),
        "rows": sum(layer["rows"] for layer in layers),
        "mismatched_rows": sum(layer["mismatched_rows"] for layer in layers),
        "max_abs": max((layer["max_abs"] for layer in layers), default=0.0),
        "max_row_ulp": max((layer["max_row_ulp"] for layer in layers), default=0.0),
        "within_1_ulp": sum(histogram[:3]) / max(1, sum(histogram)),
        "histogram": histogram,
    }


def main() -> int:
    """Run everything; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", default="eager,graph")
    parser.add_argument("--windows", type=int, default=3, help="speed: pairs of off and on")
    parser.add_argument("--startup", type=float, default=90, help="seconds for the servers to come up")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    held = [p["tokens"] for p in json.loads((ASSETS / "heldout.json").read_text())["prompts"]]
    prompts = [ids[: 24 + 8 * number] for number, ids in enumerate(held[:8])]
    long = [token for ids in held for token in ids][:3000]
    failures: list[str] = []
    record: dict[str, Any] = {"failures": failures, "kinds": {}}
    begin, logs = time.time(), Path(tempfile.mkdtemp())
    names = [(kind, mode) for kind in kinds for mode in MODES]
    servers = {
        pair: Server("_".join(pair), pair[1], pair[0], 20000 + 1500 * number, logs) for number, pair in enumerate(names)
    }
    bad = Server("bad_mode", "yes", "eager", 20000 + 1500 * len(names), logs)
    try:
        until = time.time() + options.startup
        with ThreadPoolExecutor(len(servers)) as pool:
            ready = list(pool.map(lambda server: server.wait(until) and warm(server, prompts, long), servers.values()))
        for server, is_ready in zip(servers.values(), ready, strict=True):
            if not is_ready:
                failures.append(f"{server.name} did not come up, or failed its first requests")
                print(server.name, *server.log.read_text(errors="replace").splitlines()[-15:], sep="\n  | ")
        record["up_s"] = time.time() - begin
        if not failures:
            for kind in kinds:
                by_mode = {mode: servers[kind, mode] for mode in MODES}
                record["kinds"][kind] = check_kind(by_mode, prompts, long, options.windows, failures)
        refused = bad.process.poll() is not None and "KDTREE_VERIFY: expected one of" in bad.log.read_text()
        record["bad_mode_refused"] = refused
        if not refused:
            failures.append("a server with KDTREE_VERIFY=yes is not refused by name")
    finally:
        for server in [*servers.values(), bad]:
            server.stop()
        record["seconds"] = time.time() - begin
        (options.out / "sglang_live.json").write_text(json.dumps(record, indent=1) + "\n")
        shutil.make_archive(str(options.out / "logs"), "gztar", logs)
        brief = {
            kind: {k: v for k, v in found.items() if not k.startswith("probe")}
            for kind, found in record["kinds"].items()
        }
        print(json.dumps(record | {"kinds": brief}))
    return 1 if failures else 0


def check_kind(
    servers: dict[str, Server], prompts: list[list[int]], long: list[int], windows: int, failures: list[str]
) -> dict[str, Any]:
    """Tokens, counters and speed of three servers that differ in mode only."""
    kind = servers["off"].name.split("_")[0]
    tokens = {}
    for mode, server in servers.items():
        single = [server.generate(ids, 64)["output_ids"] for ids in [*prompts, long]]
        tokens[mode] = {"single": single, "batch": [r["output_ids"] for r in batch(server, prompts, 64)]}
    found: dict[str, Any] = {"divergences": {}}
    for mode in ("validate", "on"):
        for how, ids in (("single", [*prompts, long]), ("batch", prompts)):
            first = divergences(servers["off"], ids, tokens["off"][how], tokens[mode][how])
            found["divergences"][f"{mode}_{how}"] = {"prompts": len(ids), "first": first}
            wide = [d for d in first if d["gap"] is None or d["gap"] > NEAR_TIE]
            if wide:
                failures.append(f"{kind} {mode} {how}: {len(wide)} divergences that are no near-ties")
    for mode in MODES:
        report = servers[mode].ask("/server_info")["internal_states"][0].get("treeverify")
        found[f"probe_{mode}"] = report
        if report is None or report["mode"] != mode:
            failures.append(f"{kind} {mode}: the probe says {report and report['mode']}")
        elif mode != "off":
            totals = found[f"summary_{mode}"] = summary(report)
            left = [backend["left_to_parent"] for backend in report["backends"] if backend["left_to_parent"]]
            if left or totals["rows"] == 0 or totals["mismatched_rows"]:
                failures.append(f"{kind} {mode}: left to parent {left}, totals {totals}")
            if totals["max_row_ulp"] > 2 or (mode == "validate" and totals["within_1_ulp"] < 0.999):
                failures.append(f"{kind} {mode}: beyond 2 ULP, or below 99.9% within 1: {totals}")
    rounds = [{mode: speed(servers[mode], long, 193) for mode in ("off", "on")} for _ in range(windows)]
    found["speed_3k"] = {
        mode: statistics.median(r[mode]["tokens_per_second"] for r in rounds) for mode in ("off", "on")
    }
    found["speed_3k"]["ratio"] = statistics.median(
        r["on"]["tokens_per_second"] / r["off"]["tokens_per_second"] for r in rounds
    )
    found["speed_rounds"] = rounds
    return found


if __name__ == "__main__":
    sys.exit(main())
