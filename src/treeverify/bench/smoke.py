"""Each implementation of the attention benchmark alone, in a process of its own: does it run, and is it right?

    python -m treeverify.bench.smoke [--points 1/9/8/1k,4/17/16/16k] [--implementations ...]

At each point: one call, waited for; a graph of calls; the cache of free memory emptied, so that a tensor that nobody
holds is gone; replays, waited for; the error of what they wrote. One line each, with stage and message of a failure.
Processes load and compile side by side and use the device in turn. The exit status is the number that failed.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from treeverify.bench import rivals
from treeverify.bench.attention_types import WRONG
from treeverify.bench.check import call_order, error_of_replay, reference
from treeverify.bench.rivals import Implementation, Missing
from treeverify.bench.timing import make_replay, median
from treeverify.bench.workloads import Indices, Point, make_pool, make_workload, parse_point, pool_slots

_TURN_SECONDS = 25
"""An implementation that holds the device longer is taken to hang, and killed."""
_REPLAYS = 4


def check_one(item: Implementation, point: Point, pool: torch.Tensor, indices: Indices) -> tuple[str, bool]:
    """Run ``item`` at ``point``; return the line to print, and whether all is well."""
    stage = "preparation"
    try:
        work = make_workload(point, pool, indices)
        calls = item.prepare(work)
        stage = "call"
        calls[0]()
        _wait(pool.device)
        stage = "second call"
        order = call_order(calls, pool.device)
        stage = "float64 reference"
        exact, last = reference(work, item.tree, order[-1]), calls[order[-1]]
        stage = "capture"
        replay = make_replay([calls[number] for number in order], pool.device)
        stage = "replay"
        error = error_of_replay(replay, last, exact)
        stage = "replay after the free memory was returned"
        del calls, work, last
        gc.collect()
        if pool.device.type == "cuda":
            torch.cuda.empty_cache()
        us = median([replay.run() for _ in range(_REPLAYS)])
        good = error <= WRONG
        return f"{len(order):4} calls {us:10.1f} us  error {error:.2e}{'' if good else '  WRONG'}", good
    except Exception as failure:  # noqa: BLE001  (a rival may raise anything; the line shows it)
        message = " ".join(f"{type(failure).__name__}: {failure}".split())
        return f"FAILED in {stage}: {message[:200]}", False


def run_child(name: str, points: Sequence[Point], turns: Path, device: torch.device) -> int:
    """Load ``name``, take a turn, print a line per point and layout; return the number of failures."""
    item = rivals.load(name)
    if isinstance(item, Missing):
        print(f"{name:24} missing: {item.reason}"[:300], flush=True)
        return 1
    failures = 0
    with _turn(turns):
        pool = make_pool(pool_slots(points, 4), device)
        for point in points:
            for indices in item.indices:
                line, good = check_one(item, point, pool, indices)
                print(f"{name:24} {point!s:>12} {indices:8} {line}", flush=True)
                failures += not good
    return failures


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _turn(turns: Path) -> Iterator[None]:
    """Alone on the device; the lock goes with the process, however it ends."""
    with turns.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.alarm(_TURN_SECONDS)  # no handler: it ends the process even inside a call that never returns
        yield
        signal.alarm(0)


def _start(name: str, arguments: argparse.Namespace, turns: Path, deadline: float) -> tuple[str, int]:
    """Run one child; return what to print and its number of failures."""
    command = [sys.executable, "-m", "treeverify.bench.smoke", f"--child={name}", f"--turns={turns}"]
    command += [f"--points={arguments.points}", f"--device={arguments.device}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            out, error = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            out, error = child.communicate()
    status = child.returncode
    if status < 0:
        why = "killed: it held the device too long" if status == -signal.SIGALRM else "killed: out of time"
        why = why if status in (-signal.SIGALRM, -signal.SIGKILL) else signal.Signals(-status).name
        return f"{out}{name:24} FAILED: {why}\n", 1
    if status and not out.strip():
        return f"{name:24} FAILED: {(error.strip().splitlines() or ['no message'])[-1][:300]}\n", 1
    return out, status


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", default="1/9/8/1k,4/17/16/16k")
    parser.add_argument("--implementations", default=",".join(rivals.NAMES))
    parser.add_argument("--seconds", type=float, default=55.0, help="everything that still runs then is killed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        points = [parse_point(text) for text in chosen.points.split(",")]
        return run_child(chosen.child, points, chosen.turns, torch.device(chosen.device))
    begin = time.monotonic()
    names = chosen.implementations.split(",")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(names)) as threads:
        turns = Path(folder) / "turns"
        jobs = [threads.submit(_start, name, chosen, turns, begin + chosen.seconds) for name in names]
        failures = 0
        for job in jobs:
            text, failed = job.result()
            print(text, end="", flush=True)
            failures += failed
    print(f"{failures} failed, {time.monotonic() - begin:.0f} s")
    return failures


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(min(status, 100))  # no teardown: a broken context makes destructors abort and hides the count
