"""Processes with a real SGLang, in Triton's interpreter: each prints what it found as one line of JSON.

One process for each scheduler or engine, because SGLang keeps globals.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OLDEST = Path(sys.prefix) / "sglang-0.5.17"
"""On PYTHONPATH it is the SGLang that is imported (``scripts/sglang_cpu_env.sh``)."""
_MARK = "OUTCOME "
_HANGS = 1500
"""Seconds after which a process is taken to hang: many times what any takes."""


def say(found: dict[str, Any]) -> None:
    """Print what a script found, for ``outcome``."""
    print(_MARK + json.dumps(found), flush=True)


def run(script: str | None, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` to its end, which must be a good one."""
    assert script is not None
    added = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, script, *map(str, arguments)]
    environ = os.environ | added
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=_HANGS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what it found."""
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(_MARK))
    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return found


def outcome(script: str | None, *arguments: object, **environment: str) -> dict[str, Any]:
    """Run ``script`` and return what it found."""
    return said(run(script, *arguments, **environment))


def with_plugin(folder: Path, module: str) -> str:
    """Make a PYTHONPATH, with ``folder``, on which SGLang finds ``module:register`` of this folder as a plugin.

    ``folder`` gets what pip would write for the entry point.
    """
    made = folder / f"{module}-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    (made / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{module} = {module}:register\n")
    return f"{folder}:{HERE}"
