"""A live SGLang server of a run, and what is asked of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from live_part import Part

MODES = ("off", "validate", "on")
NEAR_TIE = 0.25
"""Nats between the two candidates at a first divergence: logits are bfloat16, of magnitude 16 to 32 here, whose spacing
is 0.125; each side may round by half of it, and the hidden states behind them as well."""
COMMON = shlex.split(
    "--host 127.0.0.1 --skip-tokenizer-init --sampling-backend pytorch --grammar-backend none --dtype bfloat16 "
    "--max-running-requests 8 --skip-server-warmup --random-seed 1 --mm-feature-transport cpu "
    "--sleep-on-idle --log-level info --cuda-graph-backend-prefill disabled"
)
BY_KIND = {
    "eager": ["--cuda-graph-backend-decode", "disabled"],
    "graph": ["--cuda-graph-bs-decode", "1", "2", "4", "8"],
}
NGRAM = shlex.split(
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16 --speculative-ngram-max-bfs-breadth 4"
)
FA3 = shlex.split(
    "--prefill-attention-backend triton --decode-attention-backend fa3 --speculative-attention-mode decode"
)
"""Verify and decode by FA3. Its slimmed library has no kernel for MLA's prefill, which no window measures."""
TREE = shlex.split("--speculative-num-steps 4 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16")
PORTS = int(os.environ.get("LIVE_PORTS", "10000"))
"""First port of this run; a run beside it gets another."""
SPACING = 300
PIDS = os.environ.get("LIVE_PIDS")
"""File that gets the process group of every server, for whoever must end them if this process is killed."""
HOLD = os.environ.get("LIVE_HOLD")
"""File whose appearance is waited for once the servers are up: the end of a part that times on the same GPU."""
ENVIRONMENT = {
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",  # other servers of a run may be on one of the GPUs
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast stays off
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Server:
    """One server process, started in mode ``off`` with every mode allowed unless ``environment`` says otherwise.

    ``slot`` numbers the servers of a run, and with it their ports. A flag in ``flags`` overrides that in ``COMMON``.
    """

    def __init__(
        self, name: str, model: Path, slot: int, folder: Path, flags: Sequence[str], **environment: str
    ) -> None:
        port = PORTS + SPACING * slot
        self.name, self.port = name, port
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--port", str(port), "--nccl-port", str(port + 7), *COMMON, *flags]
        settings = {"KDTREE_VERIFY": "off", "KDTREE_VERIFY_ALLOW": ",".join(MODES)} | environment
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | settings,
                start_new_session=True,
                cwd=folder,
            )
        if PIDS:
            with Path(PIDS).open("a") as file:
                print(self.process.pid, file=file)

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = 120) -> Any:
        """Send one request and return the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
        try:
            return json.loads(text or b"null")
        except ValueError:
            return text.decode(errors="replace")

    def generate(
        self, prompts: list[list[int]], tokens: int, *, sampling: Sequence[dict[str, Any]] = (), **more: Any
    ) -> list[dict[str, Any]]:
        """Continuations of ``prompts``, sent as one request, so that they form one batch.

        Greedy, unless ``sampling`` has the parameters of each prompt.
        """
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        each = [parameters | one for one in sampling] or parameters
        found: list[dict[str, Any]] = self.ask("/generate", {"input_ids": prompts, "sampling_params": each, **more})
        return found

    def each(self, prompts: list[list[int]], tokens: int, at_once: int) -> list[dict[str, Any]]:
        """Greedy continuations of ``prompts``, each a request of its own, ``at_once`` of them at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda ids: self.generate([ids], tokens)[0], prompts))

    def tokens(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Their tokens only."""
        return [one["output_ids"] for one in self.generate(prompts, tokens)]

    def writes(self) -> bool:
        """Whether it answers a request for a text."""
        try:
            return len(self.generate([[5, 6, 7, 8]], 24)[0]["output_ids"]) == 24
        except (OSError, KeyError, TypeError):
            return False

    def switch(self, mode: str) -> None:
        """Switch the mode of every rank; raises ``RuntimeError`` if the server refuses or its state says otherwise."""
        answer = self.ask("/set_internal_state", {"server_args": {"treeverify_mode": MODES.index(mode)}})
        found = {rank["mode"] for rank in self.state()["ranks"]}
        if answer != [True] or found != {mode}:
            raise RuntimeError(f"{self.name}: switch to {mode}: answer {answer}, modes {found}")

    def state(self, key: str = "treeverify") -> dict[str, Any]:
        """The backend's entry of the info query, or another one's."""
        found: dict[str, Any] = self.ask("/server_info")["internal_states"][0][key]
        return found

    def wait(self, until: float) -> bool:
        """Wait until the server is up; False if it died or the time is over."""
        while time.time() < until and self.process.poll() is None:
            try:
                self.ask("/health", timeout=2)
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
            else:
                return True
        return False

    def lines(self, word: str) -> list[str]:
        """Lines of its log that hold ``word``."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if word in line]

    def notes(self) -> list[str]:
        """What the plugin logged, without the lines around it."""
        return re.findall(r"\] (treeverify[ a-z]*: .*)", self.log.read_text(errors="replace"))

    def stop(self) -> None:
        """Kill the server and its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def running(part: Part, servers: Sequence[Server], optional: Sequence[Server] = ()) -> Iterator[list[Server]]:
    """Wait for the servers of a part and stop them after it; gives those of ``optional`` that came up.

    Raises ``RuntimeError`` if one of ``servers`` does not come up. One of ``optional`` that does not, or that does not
    answer a request, becomes a failure of the part.
    """
    try:
        down = start([*servers, *optional], part.startup)
        down += [server.name for server in optional if server.name not in down and not server.writes()]
        part.failures += [f"{name} did not come up, or does not answer" for name in down]
        part.keep("up_s", part.spent())
        if HOLD:
            part.begin += hold(Path(HOLD))
        if {server.name for server in servers} & set(down):
            raise RuntimeError("stopped: a server that the part needs did not come up")
        yield [server for server in optional if server.name not in down]
    finally:
        for server in [*servers, *optional]:
            server.stop()


def hold(ended: Path) -> float:
    """Wait until ``ended`` is there; returns the seconds."""
    begin = time.monotonic()
    while not ended.exists():
        time.sleep(0.2)
    return time.monotonic() - begin


def start(servers: Sequence[Server], seconds: float) -> list[str]:
    """Wait for all; returns the names of those that did not come up, with the end of their log printed."""
    until = time.time() + seconds
    with ThreadPoolExecutor(len(servers)) as pool:
        ready = list(pool.map(lambda server: server.wait(until), servers))
    down = [server for server, is_ready in zip(servers, ready, strict=True) if not is_ready]
    for server in down:
        print(server.name, *server.log.read_text(errors="replace").splitlines()[-25:], sep="\n  | ", flush=True)
    return [server.name for server in down]


def plant(folder: Path, name: str, code: str) -> Path:
    """Write a plugin of SGLang, whose ``activate`` is in ``code``; returns what to put on the path."""
    root = folder / "plant"
    info = root / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:activate\n")
    (root / f"{name}.py").write_text(code)
    return root


def has_fa3() -> bool:
    """Whether the bundle that is on the path brought FA3."""
    return any((Path(folder) / "sgl_kernel/flash_ops.abi3.so").exists() for folder in sys.path)


def gap(server: Server, ids: list[int], candidates: tuple[int, int]) -> float | None:
    """Difference of the two candidates' log probabilities after ``ids``, None if the server does not say."""
    try:
        meta = server.generate([ids], 1, return_logprob=True, top_logprobs_num=8)[0]["meta_info"]
        found = {token: value for value, token, *_ in meta["output_top_logprobs"][0]}
        return abs(found[candidates[0]] - found[candidates[1]])
    except (OSError, KeyError, IndexError, TypeError, ValueError):
        return None


def divergences(
    judge: Server, prompts: list[list[int]], expected: list[list[int]], got: list[list[int]]
) -> list[dict[str, Any]]:
    """First difference of each prompt's tokens, with the gap of the two candidates in the mode that ``judge`` is in."""
    found = []
    for number, (ids, want, have) in enumerate(zip(prompts, expected, got, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), None)
        if at is not None:
            pair = (want[at], have[at])
            near = gap(judge, ids + want[:at], pair)
            found.append({"prompt": number, "position": at, "tokens": pair, "gap": near, "bound": NEAR_TIE})
    return found


def wide(first: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those divergences that are no near-ties."""
    return [one for one in first if one["gap"] is None or one["gap"] > NEAR_TIE]


def summary(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Fold the layers of each backend, over all ranks."""
    found = []
    for rank in state["ranks"]:
        for number, backend in enumerate(rank["backends"]):
            layers = backend["layers"]
            histogram = [sum(column) for column in zip(*(layer["histogram"] for layer in layers), strict=True)]
            found.append(
                {
                    "rank": rank["rank"],
                    "backend": "draft" if number else "target",
                    "kernel": backend["kernel"],
                    "served": backend["served"],
                    "left_to_parent": backend["left_to_parent"],
                    "breaches": backend["breaches"],
                    "dumps": backend["dumps"],
                    "layers": len(layers),
                    "rows": sum(layer["rows"] for layer in layers),
                    "mismatched_rows": sum(layer["mismatched_rows"] for layer in layers),
                    "max_abs": max((layer["max_abs"] for layer in layers), default=0.0),
                    "max_row_ulp": max((layer["max_row_ulp"] for layer in layers), default=0.0),
                    "max_relative": max((layer["max_relative"] for layer in layers), default=0.0),
                    "within_1_ulp": sum(histogram[:3]) / max(1, sum(histogram)),
                    "histogram": histogram,
                }
            )
    return found
