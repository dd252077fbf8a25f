"""Markdown to sentences: what is left of a page without code blocks, tables and headings."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LEAST_WORDS = 3
"""Shorter pieces are labels, not sentences."""

_FENCE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
_NOT_PROSE = re.compile(r"^(#|\||!\[|<)")
_ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[^a-z])")


def without_code(text: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", text)


def paragraphs(text: str) -> list[str]:
    """Paragraphs and list items, each on one line; a link is its text."""
    found: list[list[str]] = [[]]
    for line in without_code(text).splitlines():
        if not line.strip() or _NOT_PROSE.match(line.strip()):
            found.append([])
            continue
        if _ITEM.match(line):
            found.append([])
        found[-1].append(_ITEM.sub("", line).strip())
    return [_LINK.sub(r"\1", " ".join(lines)) for lines in found if lines]


def sentences(text: str) -> list[str]:
    """The sentences of a page; a colon or a semicolon ends none."""
    pieces = [piece for paragraph in paragraphs(text) for piece in _END.split(paragraph)]
    return [piece for piece in pieces if words(piece) >= LEAST_WORDS]


def words(text: str) -> int:
    """Words, that is, what white space separates and holds a letter or a digit."""
    return sum(any(sign.isalnum() for sign in word) for word in text.split())


def cells(text: str) -> list[str]:
    """Every cell of every table."""
    rows = [line.strip() for line in without_code(text).splitlines() if line.strip().startswith("|")]
    return [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
