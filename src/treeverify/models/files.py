"""Reading the JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treeverify.errors import ConfigError, TreeverifyError


def json_object(file: Path, error: type[TreeverifyError] = ConfigError) -> dict[str, Any]:
    """Read the JSON object in ``file``; ``error``, one line, when it cannot be read or is something else."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"{file}: cannot be read: {reason.strerror or reason}") from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{file}: not JSON: {reason}") from None
    if not isinstance(data, dict):
        raise error(f"{file}: expected a JSON object, got {type(data).__name__}")
    return data
