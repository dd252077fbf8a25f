"""Live SGLang servers on one GPU: plain, DFLASH chains and DDTREE on the packaged model and drafter.

Run by ddtree_live.sh. Parts: ``tokens`` compares greedy texts with plain decoding's, one request at a time and sixteen
at once, and lists each first difference with the gap of the two candidates; ``speed`` takes tokens per second in turns,
each server alone; ``sampling`` repeats seeds at temperature 1. Exit status 1 if a check fails.
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
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "src/treeverify/assets"
NEAR_TIE = 0.5
"""Nats between the two candidates at a first difference. The logits are bfloat16 of magnitude 16 to 32 (spacing 0.125),
and the record of this model's log-probabilities in SGLang against float32 has a largest error of 0.51."""
AT_ONCE = 16
COMMON = shlex.split(
    "--host 127.0.0.1 --skip-tokenizer-init --sampling-backend pytorch --grammar-backend none --dtype bfloat16 "
    "--context-length 4096 --max-total-tokens 40000 --max-running-requests 16 --mem-fraction-static 0.7 "
    "--disable-radix-cache --skip-server-warmup --random-seed 1 --mm-feature-transport cpu --sleep-on-idle "
    "--log-level info --cuda-graph-backend-prefill disabled"
)
BY_KIND = {
    "eager": ["--cuda-graph-backend-decode", "disabled"],
    "graph": ["--cuda-graph-bs-decode", "1", "2", "4", "8", "16"],
}
DRAFT = f"--speculative-draft-attention-backend triton --speculative-draft-model-path {ASSETS / 'drafter'}"
ENVIRONMENT = {
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def flags(mode: str) -> tuple[list[str], str]:
    """Flags of a server and its KDTREE_VERIFY: plain, dflash[-on], ddtreeN[-triton][-sync], N nodes with the root.

    A last ``-tp2`` spreads any of them over two GPUs.
    """
    name, *options = mode.split("-")
    ranks = ["--tp-size", "2"] if "tp2" in options else []
    if name == "plain":
        return ["--attention-backend", "triton", *ranks], "off"
    ours = "on" in options if name == "dflash" else "triton" not in options
    text = f"--attention-backend {'treeverify' if ours else 'triton'} {DRAFT} --speculative-algorithm "
    text += "DFLASH" if name == "dflash" else f"DDTREE --speculative-num-draft-tokens {name.removeprefix('ddtree')}"
    text += " --disable-overlap-schedule" if "sync" in options else ""
    return [*shlex.split(text), *ranks], "on" if ours else "off"


class Server:
    """One server process."""

    def __init__(self, mode: str, kind: str, port: int, folder: Path) -> None:
        self.mode, self.port, self.log = mode, port, folder / f"{mode}.log"
        given, verify = flags(mode)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(ASSETS / "target")]
        command += ["--port", str(port), "--nccl-port", str(port + 7), *COMMON, *BY_KIND[kind], *given]
        environment = os.environ | ENVIRONMENT | {"KDTREE_VERIFY": verify}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=folder
            )

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = 90) -> Any:
        """Send one request and return the answer."""
        data = None if body is None else json.dumps(body).encode()
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
            return json.loads(answer.read() or b"null")

    def generate(self, ids: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        """Continue ``ids``, greedily unless told otherwise."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        return self.ask("/generate", {"input_ids": ids, "sampling_params": parameters})

    def all(self, prompts: list[list[int]], tokens: int, at_once: int) -> list[dict[str, Any]]:
        """Continue all prompts, ``at_once`` of them at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda ids: self.generate(ids, tokens), prompts))

    def up(self, until: float) -> bool:
        """Wait until the server answers and has run a batch of each size; False if it does not come to that."""
        while time.time() < until and self.process.poll() is None:
            try:
                self.ask("/health", timeout=2)
            except (OSError, ValueError):
                time.sleep(0.5)
                continue
            try:
                for count in (1, 4, AT_ONCE):
                    self.all([[5, 6, 7, 8 + i] for i in range(count)], 24, count)
            except (OSError, ValueError) as error:
                print(f"{self.mode}: {error}")
                return False
            return True
        return False

    def stop(self) -> None:
        """Kill the server and its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def gap(judge: Server, ids: list[int], pair: tuple[int, int]) -> float | None:
    """Difference of two candidates' log-probabilities after ``ids`` in plain decoding, None if it does not say."""
    body = {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 8}
    try:
        answer = judge.ask("/generate", body | {"sampling_params": {"temperature": 0, "max_new_tokens": 1}})
        found = {token: value for value, token, *_ in answer["meta_info"]["output_top_logprobs"][0]}
        return abs(found[pair[0]] - found[pair[1]])
    except (OSError, KeyError, IndexError, TypeError, ValueError):
        return None


def differences(judge: Server, prompts: list[list[int]], want: list[list[int]], got: list[list[int]]) -> dict[str, Any]:
    """First difference of each text from the wanted one."""
    first = []
    for number, (ids, a, b) in enumerate(zip(prompts, want, got, strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            near = gap(judge, ids + a[:at], (a[at], b[at]))
            first.append({"prompt": number, "position": at, "tokens": [a[at], b[at]], "gap": near})
    return {"prompts": len(prompts), "identical": len(prompts) - len(first), "first": first}


def acceptance(answers: list[dict[str, Any]]) -> dict[str, float] | None:
    """Tokens per verify step, and SGLang's own figure; None without speculation."""
    meta = [answer["meta_info"] for answer in answers]
    if not all(m.get("spec_verify_ct") for m in meta):
        return None
    own = [m["spec_accept_length"] for m in meta]
    steps = sum(m["spec_verify_ct"] for m in meta)
    return {
        "tokens_per_step": sum(m["completion_tokens"] for m in meta) / steps,
        "spec_accept_length": sum(own) / len(own),
        "steps": steps,
    }


def tokens(servers: dict[str, Server], prompts: list[list[int]], new: int, failures: list[str]) -> dict[str, Any]:
    """Texts of all servers against plain decoding's, alone and in batches; all servers at once, they do not mix."""
    found: dict[str, Any] = {}
    for how, at_once in (("alone", 1), ("batch", AT_ONCE)):
        with ThreadPoolExecutor(len(servers)) as pool:
            running = {mode: pool.submit(server.all, prompts, new, at_once) for mode, server in servers.items()}
            answers = {mode: run.result() for mode, run in running.items()}
        want = [answer["output_ids"] for answer in answers["plain"]]
        for mode, got in answers.items():
            entry = differences(servers["plain"], prompts, want, [answer["output_ids"] for answer in got])
            found.setdefault(mode, {})[how] = entry | {"acceptance": acceptance(got)}
            wide = [d for d in entry["first"] if d["gap"] is None or d["gap"] > NEAR_TIE]
            if wide:
                failures.append(f"{mode} {how}: {len(wide)} differences that are no near-ties: {wide[:3]}")
    return found


def speed(servers: dict[str, Server], prompts: list[list[int]], new: int, windows: int) -> dict[str, Any]:
    """Tokens per second of one server at a time, in turns; the time holds the prefill of the short prompts."""
    rounds: dict[str, dict[str, list[float]]] = {}
    for _ in range(windows):
        for requests in (1, 4, AT_ONCE):
            for mode, server in servers.items():
                begin = time.perf_counter()
                server.all(prompts[:requests], new, requests)
                rate = requests * new / (time.perf_counter() - begin)
                rounds.setdefault(mode, {}).setdefault(f"bs{requests}", []).append(round(rate, 1))
    medians = {mode: {bs: statistics.median(v) for bs, v in sizes.items()} for mode, sizes in rounds.items()}
    return {"median": medians, "rounds": rounds}


def sampling(servers: dict[str, Server], prompts: list[list[int]], failures: list[str]) -> dict[str, Any]:
    """At temperature 1 a seed repeats its text alone; another seed gives another text; greedy neighbours stay."""
    found = {}
    for mode, server in servers.items():
        if mode == "plain":
            continue
        texts = [
            server.generate(prompts[0], 64, temperature=1.0, sampling_seed=seed)["output_ids"] for seed in (7, 7, 8)
        ]
        # The first token is SGLang's own draw; texts that share it must agree after it.
        same = texts[0][0] != texts[1][0] or texts[0] == texts[1]
        found[mode] = {"first_tokens": [text[0] for text in texts], "same_seed": same, "other": texts[0] != texts[2]}
        if not same:
            failures.append(f"{mode}: seed 7 gave two texts after the same first token")
    return found


def main() -> int:
    """Run the parts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=BY_KIND, default="graph")
    parser.add_argument("--modes", default="plain,dflash,ddtree17")
    parser.add_argument("--parts", default="tokens,speed,sampling")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--startup", type=float, default=130, help="seconds for the servers to come up")
    options = parser.parse_args()
    parts, modes = options.parts.split(","), options.modes.split(",")
    held = [p["tokens"] for p in json.loads((ASSETS / "heldout.json").read_text())["prompts"]]
    starts = [held[n % len(held)][n // len(held) * 64 :][:32] for n in range(options.prompts)]
    failures: list[str] = []
    record: dict[str, Any] = {"kind": options.kind, "modes": modes, "failures": failures}
    begin, logs = time.time(), Path(tempfile.mkdtemp())
    servers = {mode: Server(mode, options.kind, 20000 + 1500 * n, logs) for n, mode in enumerate(modes)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a time limit still writes the record
    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            ready = list(pool.map(lambda server: server.up(begin + options.startup), servers.values()))
        for server, is_ready in zip(list(servers.values()), ready, strict=True):
            if not is_ready:
                failures.append(f"{server.mode} did not come up, or failed its first requests")
                print(server.mode, *server.log.read_text(errors="replace").splitlines()[-25:], sep="\n  | ")
                servers.pop(server.mode).stop()
        record["up_s"] = time.time() - begin
        if "tokens" in parts and "plain" in servers:
            record["tokens"] = tokens(servers, starts, options.new, failures)
        if "speed" in parts:
            record["speed"] = speed(servers, starts, options.new, options.windows)
        if "sampling" in parts:
            record["sampling"] = sampling(servers, starts, failures)
        record["ddtree"] = {
            mode: server.ask("/server_info")["internal_states"][0].get("ddtree") for mode, server in servers.items()
        }
    finally:
        for server in servers.values():
            server.stop()
        record["seconds"] = time.time() - begin
        (options.out / f"ddtree_live_{options.kind}.json").write_text(json.dumps(record, indent=1) + "\n")
        shutil.make_archive(str(options.out / f"ddtree_logs_{options.kind}"), "gztar", logs)
        print(json.dumps(record)[:11000])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
