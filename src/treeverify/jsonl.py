"""JSON Lines: the one place that says where a line ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from treeverify.errors import ConfigError

_BLANK = " \t\r"
"""What JSON lets stand around a value."""


def lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line of ``path`` that is not blank.

    Lines end at ``\\n`` only: other line separators of Unicode may stand in a JSON text as they are. ``what`` says in
    messages what they are. Raises ConfigError that names the file where it cannot be read.
    """
    try:
        text = path.read_bytes().decode().removeprefix("\ufeff")
    except OSError as error:
        raise ConfigError(f"{path}: {what} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {what} cannot be read: {error}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip(_BLANK):
            yield number, line
