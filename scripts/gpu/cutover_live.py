"""The cutover on real SGLang servers, through the restart-command runner; the packaged model, NGRAM trees.

Run by ``LIVE=cutover_live.py sglang_live.sh``. Parts: ``live`` goes off, validate, soak, validate-eager, on-eager,
validate-graphs, on, unit on one GPU, then rolls back; ``trees`` cuts a DDTREE server over, which refuses
log-probabilities: refused without consent, done with it; ``broken`` is on two GPUs, one head of one rank scaled by
1.05: the run must be stopped and rolled back. Each command's exit code, words and seconds, the journal and the report
go to --out. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ddtree_servers import ASSETS, flags
from live_server import BY_KIND, COMMON, ENVIRONMENT, NGRAM, PORTS

from treeverify.control.client import read_state
from treeverify.errors import ServerError
from treeverify.models.heldout import load_heldout

SIZES = "--context-length 4096 --max-total-tokens 40000 --mem-fraction-static 0.5 --disable-radix-cache"
CHAINS = ["--attention-backend", "treeverify", *NGRAM, *BY_KIND["graph"]]
EAGER = "--cuda-graph-backend-decode disabled"
RESTART = """
[ -f pid ] && kill -9 -- "-$(cat pid)" 2>/dev/null && sleep 2
set -a; . ./base.env; [ -f owned.env ] && . ./owned.env; set +a
setsid {command} $SGLANG_STAGE_ARGS >>server.log 2>&1 </dev/null &
echo $! >pid
[ -z "${{LIVE_PIDS:-}}" ] || echo $! >>"$LIVE_PIDS"
"""
BREAKER = """
def activate():
    import torch
    from treeverify.integrations.sglang import attention
    right = attention.Verifier.attend
    def attend(self, call, mode, out):
        right(self, call, mode, out)
        if torch.distributed.get_rank() == 1:
            out[:, 0] *= 1.05
        return out
    attention.Verifier.attend = attend
"""


class Cutover:
    """One server under a restart script in ``folder``, and the command."""

    def __init__(self, folder: Path, port: int, chosen: list[str], broken: bool = False) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        folder.mkdir(parents=True)
        target = str(ASSETS / "target")
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", target, "--port", str(port)]
        command += ["--nccl-port", str(port + 7), *COMMON, *chosen, *shlex.split(SIZES)]
        (folder / "restart.sh").write_text(RESTART.format(command=shlex.join(command)))
        base = ENVIRONMENT | {"KDTREE_VERIFY": "off", "KDTREE_VERIFY_ALLOW": "off,validate,on"}
        if broken:
            base["PYTHONPATH"] = f"{self._plant()}:{os.environ['PYTHONPATH']}"
        (folder / "base.env").write_text("".join(f"{name}={value}\n" for name, value in base.items()))
        texts = [{"input": text.prompt_ids, "forced": text.continuation_ids} for text in load_heldout()[:24]]
        rows = [{name: [int(i) for i in ids] for name, ids in text.items()} for text in texts]
        (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        settings = {"prompts_file": str(folder / "prompts.jsonl"), "health_seconds": 150}
        (folder / "settings.json").write_text(json.dumps(settings))

    def _plant(self) -> Path:
        """A plugin of SGLang that breaks rank 1."""
        info = self.folder / "plant" / "broken_rank-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-rank\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbroken_rank = broken_rank:activate\n")
        (info.parent / "broken_rank.py").write_text(BREAKER)
        return info.parent

    def restart(self, seconds: float = 150) -> None:
        """Start the server and wait for it."""
        subprocess.run(["bash", "restart.sh"], cwd=self.folder, check=True)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                read_state(self.url, timeout=5)
            except ServerError:
                time.sleep(1)
            else:
                return
        raise SystemExit((self.folder / "server.log").read_text()[-3000:])

    def ask(self, what: str, *more: str) -> dict[str, Any]:
        """Run ``treeverify cutover WHAT``; returns exit code, words and seconds."""
        restart = f"cd {shlex.quote(str(self.folder))} && bash restart.sh"
        where = ["--unit", self.folder.name, "--url", self.url, "--state", str(self.folder / "state")]
        where += ["--restart-command", restart, "--environment-file", str(self.folder / "owned.env")]
        began = time.monotonic()
        words = [sys.executable, "-m", "treeverify", "cutover", what, *where, *more]
        said: list[str] = []
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tool:
            for line in tool.stdout or ():
                print(f"{time.monotonic() - began:6.1f} s  {line}", end="", flush=True)
                said += [line.rstrip()] if line.strip() else []
        return {"what": what, "code": tool.returncode, "said": said, "seconds": round(time.monotonic() - began, 1)}

    def run(self, *more: str) -> dict[str, Any]:
        """Go to on."""
        return self.ask("run", "--to", "on", "--soak", "5", "--settings", str(self.folder / "settings.json"), *more)

    def modes(self) -> list[str]:
        """Mode of every rank."""
        return [rank.mode.value for state in read_state(self.url) for rank in state.ranks]

    def stop(self) -> None:
        """Kill the server."""
        subprocess.run(["bash", "-c", 'kill -9 -- "-$(cat pid)"'], cwd=self.folder, check=False)


def live(folder: Path) -> dict[str, Any]:
    """To on by way of an eager stage, and back."""
    cutover = Cutover(folder, PORTS, CHAINS)
    cutover.restart()
    steps = [cutover.run("--allow-restart", "--eager", f"SGLANG_STAGE_ARGS={EAGER}")]
    modes = [cutover.modes()]
    steps.append(cutover.ask("rollback"))
    modes.append(cutover.modes())
    cutover.stop()
    passed = [step["code"] for step in steps] == [0, 0] and modes == [["on"], ["off"]]
    return {"part": "live", "passed": passed, "modes": modes, "steps": steps}


def trees(folder: Path) -> dict[str, Any]:
    """DDTREE: refused for want of log-probabilities, then to on without them."""
    cutover = Cutover(folder, PORTS + 600, flags("ddtree17", ASSETS / "drafter")[0])
    cutover.restart()
    steps, modes = [], []
    for more in ([], ["--without-logprobs"]):
        steps.append(cutover.run(*more))
        modes.append(cutover.modes())
    cutover.stop()
    passed = [step["code"] for step in steps] == [9, 0] and modes == [["off"], ["on"]]
    return {"part": "trees", "passed": passed, "modes": modes, "steps": steps}


def broken(folder: Path) -> dict[str, Any]:
    """Two ranks, one of them wrong: stopped by a gate, and every rank off again."""
    cutover = Cutover(folder, PORTS + 300, [*CHAINS, "--tp-size", "2"], broken=True)
    cutover.restart()
    step = cutover.run()
    modes = cutover.modes()
    cutover.stop()
    passed = step["code"] == 20 and modes == ["off", "off"] and "rank 1" in " ".join(step["said"])
    return {"part": "broken", "passed": passed, "modes": modes, "steps": [step]}


PARTS = {"live": live, "trees": trees, "broken": broken}


def main() -> int:
    """Run the parts and write ``cutover-live.json`` and each report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="live", help="of live, trees, broken")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped from outside"))
    found: list[dict[str, Any]] = []
    for part in options.parts.split(","):
        folder = Path.home() / ".cache" / "treeverify-cutover" / part
        shutil.rmtree(folder, ignore_errors=True)
        try:
            found.append(PARTS[part](folder))
        finally:
            keep(folder, options.out, part)
            (options.out / f"cutover-{part}.json").write_text(json.dumps(found, indent=1))
    return int(not all(part["passed"] for part in found))


def keep(folder: Path, out: Path, part: str) -> None:
    """Copy what a part left: reports, journal, the end of the server's log."""
    for report in folder.glob("state/*/parity-report.*"):
        shutil.copy(report, out / f"{part}-{report.name}")
    for name in ("state/journal.jsonl", "server.log"):
        if (folder / name).exists():
            text = (folder / name).read_text(errors="replace")[-200000:]
            (out / f"{part}-{Path(name).name}").write_text(text)


if __name__ == "__main__":
    raise SystemExit(main())
