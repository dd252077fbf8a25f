"""Records: one JSON object per measurement, appended to a file in ``benchmarks/results/``, each checked when written.

Every record says what was measured (``benchmark``, ``impl``, ``case``) and where (``environment()``). ``attention`` and
``ceiling`` have fields of their own; every other benchmark puts its numbers into ``measures``.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import torch

from treeverify.errors import ConfigError
from treeverify.text import json_lines

Record: TypeAlias = dict[str, Any]

_TEXT = (str,)
_TEXT_OR_NONE = (str, type(None))
_NUMBER_OR_NONE = (float, int, type(None))
_LIST = (list,)
_MAPPING = (dict,)

COMMON: Mapping[str, tuple[type, ...]] = {
    "benchmark": _TEXT,
    "impl": _TEXT,
    "case": _MAPPING,
    "gpu": _TEXT_OR_NONE,
    "driver": _TEXT_OR_NONE,
    "cpu": _TEXT,
    "torch": _TEXT,
    "commit": _TEXT,
    "date": _TEXT,
}
"""Fields of every record with their types; ``gpu`` and ``driver`` are null where there is none."""

SPECIFIC: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "attention": {
        "us": _NUMBER_OR_NONE,
        "us_runs": _LIST,
        "floor_us": _NUMBER_OR_NONE,
        "bound": _TEXT,
        "ratio": _NUMBER_OR_NONE,
        "error": _NUMBER_OR_NONE,
        "reason": _TEXT_OR_NONE,
        "rates": _MAPPING,
    },
    "ceiling": {"rate": _NUMBER_OR_NONE, "rate_runs": _LIST, "unit": _TEXT, "reason": _TEXT_OR_NONE},
}
"""Further fields by benchmark. ``reason`` says why a number is null; one of the two is always set."""

_OTHERS: Mapping[str, tuple[type, ...]] = {"measures": _MAPPING}
_CASES: Mapping[str, tuple[str, ...]] = {"attention": ("bs", "nodes", "heads", "prefix", "indices")}
_RESULT = {"attention": "us", "ceiling": "rate"}


def check(record: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` naming the field if ``record`` does not fit its benchmark's schema."""
    fields = {**COMMON, **SPECIFIC.get(str(record.get("benchmark")), _OTHERS)}
    for name, kinds in fields.items():
        if name not in record:
            raise ConfigError(f"record: field {name!r} is missing")
        value = record[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"record: field {name!r}: expected {expected}, got {type(value).__name__}")
    unknown = sorted(set(record) - set(fields))
    if unknown:
        raise ConfigError(f"record: unknown field {unknown[0]!r}; its benchmark knows {', '.join(fields)}")
    benchmark = record["benchmark"]
    if missing := [key for key in _CASES.get(benchmark, ()) if key not in record["case"]]:
        raise ConfigError(f"record: case lacks {missing[0]!r}")
    result = _RESULT.get(benchmark)
    if result and (record[result] is None) == (record["reason"] is None):
        raise ConfigError(f"record: exactly one of {result!r} and 'reason' must be set")
    _check_finite("record", record)


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Check ``record`` and add it to the end of ``path`` as one line, creating the folder if needed."""
    check(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def read(path: Path, benchmark: str | None = None) -> list[Record]:
    """Read and check every record of ``path``; of one ``benchmark`` only if it is named.

    Raises ``ConfigError`` with the line number for a line that is no valid record, or if the file is missing.
    """
    return [record for record in _lines(path) if benchmark in (None, record["benchmark"])]


def environment(*, commit: str | None = None, device: int = 0) -> Record:
    """Describe this machine: ``gpu``, ``driver``, ``cpu``, ``torch``, ``commit``, ``date`` (UTC, to the second).

    ``commit`` is taken as given, else asked of git in the current folder (with ``-dirty`` for changed tracked files),
    else ``unknown``.
    """
    gpu = torch.cuda.get_device_name(device) if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "driver": _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device}"),
        "cpu": _cpu(),
        "torch": torch.__version__,
        "commit": commit or _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _lines(path: Path) -> Iterator[Record]:
    if not path.is_file():
        raise ConfigError(f"records: no such file: {path}")
    for number, line in json_lines(path, "records"):
        try:
            record = json.loads(line)
            check(record)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        yield record


def _check_finite(name: str, value: object) -> None:
    """NaN and infinity are no JSON, and no measurement."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: expected a finite number, got {value}")
    children: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    for key, child in children:
        _check_finite(f"{name}[{key!r}]", child)


def _ask(program: str, *arguments: str) -> str | None:
    """First line that ``program`` prints, or None if it is not installed or fails."""
    if shutil.which(program) is None:
        return None
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=30)
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def _commit() -> str:
    commit = _ask("git", "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("-dirty" if _ask("git", "status", "--porcelain", "--untracked-files=no") else "")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in _text(info).splitlines() if line.startswith("model name")]
    return f"{names[0]} x{len(names)}" if names else platform.machine()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
