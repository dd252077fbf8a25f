"""Load a checkpoint pair in SGLang 0.5.17 on a GPU and compare it with the project's own float32 forward.

`python -m training.sglang_load PAIR --out FILE.json` starts three servers (plain, NGRAM tree, DFLASH chain; Triton
back end, CUDA graphs), reads the logprobs of true held-out text from the plain one, greedy continuations from all,
and DFLASH's acceptance length. SGLang must be importable by the running interpreter.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from training.checkpoint import load_target
from training.shapes import TargetShape

COMMON = (
    "--host 127.0.0.1 --skip-tokenizer-init --sampling-backend pytorch --grammar-backend none --dtype bfloat16 "
    "--max-total-tokens 32768 --max-running-requests 8 --mem-fraction-static 0.8 --context-length 4096 "
    "--disable-radix-cache --skip-server-warmup --random-seed 1 --mm-feature-transport cpu --sleep-on-idle "
    "--log-level info --attention-backend triton --cuda-graph-backend-prefill disabled --cuda-graph-bs-decode 1 2 4 8"
)
MODES = {
    "plain": "",
    "ngram": "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16 --speculative-ngram-max-bfs-breadth 4",
    "dflash": "--speculative-algorithm DFLASH --speculative-draft-attention-backend triton "
    "--speculative-draft-model-path {drafter}",
}
ENVIRONMENT = {
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


class Server:
    """One SGLang server in a process group of its own."""

    def __init__(self, mode: str, pair: Path, port: int, logs: Path) -> None:
        self.mode, self.port, self.log = mode, port, logs / f"{mode}.log"
        flags = MODES[mode].format(drafter=pair / "drafter").split()
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(pair / "target")]
        command += ["--port", str(port), "--nccl-port", str(port + 7), *flags, *COMMON.split()]
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=os.environ | ENVIRONMENT, start_new_session=True
            )

    def wait(self, deadline: float) -> None:
        """Return once it answers; raise with the end of its log if it dies or is late."""
        while time.time() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.5)
        tail = "\n".join(line[:220] for line in self.log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"{self.mode} did not come up:\n{tail}")

    def ask(self, ids: list[int], new: int, **more: Any) -> dict[str, Any]:
        """One greedy request."""
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = json.dumps({"input_ids": ids, "sampling_params": sampling, **more}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=90) as answer:
            return json.loads(answer.read())

    def ask_all(self, prompts: list[list[int]], new: int) -> list[dict[str, Any]]:
        """Greedy requests, eight at a time."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda ids: self.ask(ids, new), prompts))

    def stop(self) -> None:
        """End the server and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


class Own:
    """The project's float32 forward."""

    def __init__(self, pair: Path) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.target = load_target(pair, TargetShape()).to(self.device).eval()

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits after every token."""
        return self.target(torch.tensor([ids], device=self.device))[0][0]

    def next_logprobs(self, ids: list[int]) -> torch.Tensor:
        """Log-probability of each token after the first."""
        law = self.logits(ids[:-1]).log_softmax(-1)
        return law.gather(-1, torch.tensor(ids[1:], device=self.device)[:, None])[:, 0].cpu()

    @torch.no_grad()
    def greedy(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Greedy continuations."""
        ids = torch.tensor(prompts, device=self.device)
        return self.target.generate(ids, new)[:, len(prompts[0]) :].tolist()

    def compare(self, prompt: list[int], own: list[int], theirs: list[int]) -> dict[str, float]:
        """First differing token, and our own logit gap between the two there."""
        place = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b), None)
        if place is None:
            return {"same": len(own)}
        logits = self.logits(prompt + own[:place])[-1]
        return {"same": place, "gap": round((logits[own[place]] - logits[theirs[place]]).item(), 4)}


def logprob_error(server: Server, own: Own, texts: list[list[int]]) -> dict[str, float]:
    """Difference of the logprobs of true text."""
    errors = []
    for ids in texts:
        answer = server.ask(ids, 1, return_logprob=True, logprob_start_len=0)
        theirs = torch.tensor([row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]])
        errors.append((theirs - own.next_logprobs(ids)).abs())
    error = torch.cat(errors)
    return {"tokens": error.numel(), "mean": round(error.mean().item(), 5), "max": round(error.max().item(), 4)}


def judge(servers: dict[str, Server], own: Own, texts: list[list[int]], prompt: int, new: int) -> dict[str, Any]:
    """All comparisons."""
    report: dict[str, Any] = {"logprobs": logprob_error(servers["plain"], own, texts[:8])}
    prompts = [ids[:prompt] for ids in texts]
    ours = own.greedy(prompts, new)
    for mode, server in servers.items():
        began = time.time()
        answers = server.ask_all(prompts, new)
        pairs = [own.compare(p, o, a["output_ids"]) for p, o, a in zip(prompts, ours, answers, strict=True)]
        differ = [p for p in pairs if "gap" in p]
        report[mode] = {
            "seconds": round(time.time() - began, 2),
            "identical": len(pairs) - len(differ),
            "of": len(pairs),
            "largest_gap_at_first_difference": max((p["gap"] for p in differ), default=0.0),
        }
        steps = [a["meta_info"].get("spec_verify_ct") for a in answers]
        if all(steps):
            done = sum(a["meta_info"]["completion_tokens"] for a in answers)
            report[mode]["tokens_per_step"] = round(done / sum(steps), 3)
            report[mode]["spec_accept_length"] = round(
                sum(a["meta_info"].get("spec_accept_length", 0.0) for a in answers) / len(answers), 3
            )
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path, help="folder with target/ and drafter/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, default=Path(".carry/heldout.json"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--port", type=int, default=21000)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds until the servers must be up")
    given = parser.parse_args()
    document = json.loads(given.heldout.read_text())
    texts = [row["tokens"] for row in document["prompts"]][: given.prompts]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a time limit still stops the servers
    began, servers, report = time.time(), {}, {}
    logs = Path(tempfile.mkdtemp())
    try:
        for index, mode in enumerate(MODES):
            servers[mode] = Server(mode, given.pair.resolve(), given.port + 1500 * index, logs)
        own, up = Own(given.pair), {}
        for mode, server in servers.items():
            try:
                server.wait(began + given.limit)
                up[mode] = server
            except RuntimeError as error:
                print(error, flush=True)
        report = {"up": list(up), "startup_seconds": round(time.time() - began, 1)}
        if "plain" in up:
            report |= judge(up, own, texts, document["prompt_tokens"], given.new)
    finally:
        for server in servers.values():
            server.stop()
    report["seconds"] = round(time.time() - began, 1)
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print("SGLANG", json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
