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
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from live_models import VOCAB
from live_part import Part
from live_server import BY_KIND, NGRAM, Server, plant, running, summary

BOUND = 0.9
"""Bf16 ULP between the two results: in a million rows, none was beyond 1."""
PREFIXES = (130, 2000, 8192, 16000, 30000, 31000, 500, 4096)
PLANT = f"""
def activate():
    from treeverify.integrations.sglang import dump
    dump.BOUND_ULP = {BOUND}
"""


def dumps(part: Part) -> None:
    """One dump per prefix; each result's error against float64, SGLang's and ours as served, in the record."""
    flags = [*NGRAM, *BY_KIND["graph"], "--context-length", "40960", "--max-total-tokens", "330000"]
    with tempfile.TemporaryDirectory() as outside:  # of the logs: a dump is up to 40 MB
        kept = Path(outside)
        server = Server(
            "dumps",
            part.models / "target",
            0,
            part.folder,
            ["--attention-backend", "treeverify", "--mem-fraction-static", "0.7", *flags],
            PYTHONPATH=f"{plant(part.folder, 'lower_bound', PLANT)}:{os.environ.get('PYTHONPATH', '')}",
            KDTREE_DUMP_DIR=str(kept),
            KDTREE_VERIFY="validate",
            KDTREE_VERIFY_ALLOW="validate",
        )
        with running(part, [server]):
            for prefix in PREFIXES:
                draw = random.Random(prefix)
                server.generate([[draw.randrange(2, VOCAB) for _ in range(prefix)]], 64)
                server.state()  # writes what was kept, and makes room for the next
            part.keep("summary", summary(server.state()))
        part.keep("asked_s", part.spent())
        replays: list[dict[str, Any]] = []
        with ThreadPoolExecutor(4) as pool:
            for one in pool.map(_replay, sorted(kept.glob("*.safetensors"))):
                replays.append(one)
                part.keep("replays", replays)
                print(json.dumps(one), flush=True)
    if len(replays) < 3:
        part.failures.append(f"dumps: {len(replays)} files, expected at least 3")
    part.failures += [f"dumps: ours is worse: {one}" for one in replays if one.get("worse", True)]


def _replay(path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "treeverify", "replay", str(path), "--json"], capture_output=True, text=True, timeout=120
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"file": path.name, "code": done.returncode, "said": (done.stdout + done.stderr)[-500:]}
    return {"file": path.name, "code": done.returncode} | found
