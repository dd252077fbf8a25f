"""JSON Lines: the one reader of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treeverify.errors import ConfigError

_BLANK = " \t\r"
"""What JSON lets stand around a value."""


def read(path: Path, what: str) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the value of each line of ``path`` that is not blank.

    Lines end at ``\\n`` only: other line separators of Unicode may stand in a JSON text as they are. ``what`` says in
    messages what they are. Raises ConfigError that names the file, and the line where it is one's fault.
    """
    try:
        text = path.read_bytes().decode().removeprefix("\ufeff")
    except OSError as error:
        raise ConfigError(f"{path}: {what} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {what} cannot be read: {error}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip(_BLANK):
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None
        yield number, value
