"""Part of the live run: verify calls dumped by a server in validate, replayed against float64.

No call of a right kernel breaches the bound. A planted plugin therefore lowers the bound of the dumper, not of the
counters, until calls are kept whose worst row is among the furthest apart.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from live_models import VOCAB
from live_server import BY_KIND, NGRAM, Server, start, summary

BOUND = 0.9
"""Bf16 ULP between the two results: in a million rows, none was beyond 1."""
PREFIXES = (130, 2000, 8192, 16000, 30000, 31000, 500, 4096)
PLANT = f"""
def activate():
    from treeverify.integrations.sglang import dump
    dump.BOUND_ULP = {BOUND}
"""


def dumps(folder: Path, models: Path, kinds: list[str], startup: float) -> tuple[dict[str, Any], list[str]]:
    """One dump per prefix; each result's error against float64, SGLang's and ours as served, in the record."""
    plant, kept = folder / "plant", folder / "dumps"
    info = plant / "lower_bound-0.dist-info"
    info.mkdir(parents=True)
    kept.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lower-bound\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nlower_bound = lower_bound:activate\n")
    (plant / "lower_bound.py").write_text(PLANT)
    flags = [*NGRAM, *BY_KIND["graph"], "--context-length", "40960", "--max-total-tokens", "330000"]
    server = Server(
        "dumps",
        models / "target",
        29000,
        folder,
        ["--attention-backend", "treeverify", "--mem-fraction-static", "0.7", *flags],
        PYTHONPATH=f"{plant}:{os.environ['PYTHONPATH']}",
        KDTREE_DUMP_DIR=str(kept),
        KDTREE_VERIFY="validate",
    )
    try:
        failures = start([server], startup)
        if failures:
            return {}, failures
        for prefix in PREFIXES:
            draw = random.Random(prefix)
            server.generate([[draw.randrange(2, VOCAB) for _ in range(prefix)]], 64)
            server.state()  # writes what was kept, and makes room for the next
        counted = summary(server.state())
    finally:
        server.stop()
    replays = [_replay(path) for path in sorted(kept.glob("*.safetensors"))]
    if len(replays) < 3:
        failures.append(f"dumps: {len(replays)} files, expected at least 3")
    failures += [f"dumps: ours is worse: {one}" for one in replays if one.get("worse", True)]
    for one in replays:
        print(json.dumps(one), flush=True)
    return {"bound": BOUND, "summary": counted, "replays": replays}, failures


def _replay(path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "treeverify", "replay", str(path), "--json"], capture_output=True, text=True, timeout=120
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"file": path.name, "code": done.returncode, "said": (done.stdout + done.stderr)[-500:]}
    return {"file": path.name, "code": done.returncode} | found
