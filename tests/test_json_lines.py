"""JSON Lines: lines end at the line feed and nowhere else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeverify.errors import ConfigError
from treeverify.text import json_lines

SEPARATORS = "\u2028\u2029\u0085"
"""What ``str.splitlines`` splits at, and JSON texts may hold as they are."""


@pytest.mark.parametrize("separator", SEPARATORS)
def test_other_separators_stand_in_a_line(tmp_path, separator):
    values = [{"input": f"a{separator}b"}, {"input": "c"}]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8")
    assert list(json_lines(path, "prompts")) == [(1, values[0]), (2, values[1])]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_whatever_json_writes_is_read_back(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    path.write_bytes("".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts).encode())
    assert [value for _, value in json_lines(path, "texts")] == texts


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_no_values(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\xef\xbb\xbf1\r\n\r\n \t\n2")
    assert list(json_lines(path, "numbers")) == [(1, 1), (4, 2)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"1\n{\n", "line 2: not JSON"),
        (b"1\r2\n", "line 1: not JSON"),
        ("1\n\u2028\n".encode(), "line 2: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"\xff\n", "numbers cannot be read"),
    ],
)
def test_what_is_no_json_is_named_with_its_line(tmp_path, content, words):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        list(json_lines(path, "numbers"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: numbers cannot be read: No such file"):
        list(json_lines(tmp_path / "none.jsonl", "numbers"))
