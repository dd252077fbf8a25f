"""Two of systemd's notations: words as ``systemctl show`` prints them, and environment files."""

from __future__ import annotations

from collections.abc import Iterator

_SHELL_ESCAPED = '"\\`$'
_C_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}
_BLANK, _LINE_END, _COMMENT = " \t\n\r", "\n\r", "#;"


def split_words(text: str) -> list[str]:
    """Split a list property (``Environment=``, ``DropInPaths=``) as systemd printed it.

    A word is bare, or in double quotes with backslash escapes: the shell's, and C's for control characters
    (``shell_maybe_quote`` in systemd's ``src/basic/escape.c``).
    """
    words, rest = [], iter(text)
    for char in rest:
        if char == " ":
            continue
        word = []
        quoted = char == '"'
        if not quoted:
            word.append(char)
        for char in rest:
            if char == ('"' if quoted else " "):
                break
            word.append(_unescape(rest) if quoted and char == "\\" else char)
        words.append("".join(word))
    return words


def _unescape(rest: Iterator[str]) -> str:
    """Return the character that the escape stands for, whose backslash was just read."""
    char = next(rest, "\\")
    if char == "x":
        return chr(int(next(rest) + next(rest), 16))
    if char in "01234567":
        return chr(int(char + next(rest) + next(rest), 8))
    return _C_ESCAPES.get(char, char)


def parse_environment_file(text: str) -> dict[str, str]:
    """Return the assignments of an environment file, the last of a name winning.

    The states and rules are those of systemd's ``src/basic/env-file.c`` (``parse_env_file_internal``, 254; earlier
    ones also take the line after a comment that ends in a backslash for a comment).
    """
    found: dict[str, str] = {}
    position, end = 0, len(text)
    while position < end:
        if text[position] in _BLANK:
            position += 1
        elif text[position] in _COMMENT:
            position = _line_end(text, position)
        else:
            equals, stop = text.find("=", position), _line_end(text, position)
            if equals == -1 or equals > stop:
                position = stop  # a line without "=" says nothing
                continue
            key = text[position:equals].rstrip(_BLANK)
            found[key], position = _value(text, equals + 1)
    return found


def _line_end(text: str, position: int) -> int:
    while position < len(text) and text[position] not in _LINE_END:
        position += 1
    return position


def _value(text: str, position: int) -> tuple[str, int]:
    """Return the value that begins at ``position`` and where its line ends."""
    value = ""
    kept = 0  # up to here, blanks at the end are part of the value
    leading = True  # blanks are skipped before the value and after a closing quote
    while position < len(text) and text[position] not in _LINE_END:
        char = text[position]
        position += 1
        if leading and char in "'\"":
            quoted, position = _quoted(text, position, char)
            value += quoted
            kept = len(value)
        elif char == "\\":
            leading = False
            if position < len(text) and text[position] not in _LINE_END:
                value += text[position]
            kept = len(value)
            position += 1
        elif not (leading and char in _BLANK):
            leading = False
            value += char
            kept = kept if char in _BLANK else len(value)
    return value[:kept], position


def _quoted(text: str, position: int, quote: str) -> tuple[str, int]:
    """Return what stands before the closing ``quote``, and the position after it."""
    value = ""
    while position < len(text) and text[position] != quote:
        char = text[position]
        position += 1
        if quote == '"' and char == "\\" and position < len(text):
            escaped = text[position]
            position += 1
            value += "" if escaped == "\n" else escaped if escaped in _SHELL_ESCAPED else f"\\{escaped}"
        else:
            value += char
    return value, position + 1


def environment_file(variables: dict[str, str]) -> str:
    """Return ``variables`` as the lines of an environment file, each value in double quotes."""
    escaped = {
        name: "".join(f"\\{c}" if c in _SHELL_ESCAPED else c for c in value) for name, value in variables.items()
    }
    return "".join(f'{name}="{value}"\n' for name, value in escaped.items())
