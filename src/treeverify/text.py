"""Text from outside (an argument, a file, standard input, a request) and to it: what UTF-8 can write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from treeverify.errors import ConfigError

_BLANK = " \t\r"
"""What JSON lets stand around a value."""


def whole(name: str, text: str) -> str:
    """``text`` itself; ConfigError that names ``name`` if it holds a lone surrogate, which no UTF-8 stands for.

    JSON can spell one, and an argument that is not UTF-8 holds one for each byte that could not be decoded.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        lone = ascii(text[error.start])
        raise ConfigError(f"{name}: expected text in UTF-8, got {lone} at character {error.start}") from None
    return text


def escaped(text: str) -> str:
    """``text`` with what UTF-8 cannot write escaped, for names and messages that go out."""
    return text.encode("utf-8", "backslashreplace").decode()


def read_text(name: str, file: Path | int) -> str:
    """All of a file (or of an open descriptor) as UTF-8, whatever the locale; ConfigError that names ``name``."""
    try:
        with open(file, encoding="utf-8", closefd=isinstance(file, Path)) as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {error}") from None


def json_lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
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
