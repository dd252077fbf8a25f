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
    values = [json.dumps({"input": f"a{separator}b"}, ensure_ascii=False), json.dumps({"input": "c"})]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f"{value}\n" for value in values), encoding="utf-8")
    assert list(json_lines(path, "prompts")) == [(1, values[0]), (2, values[1])]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_whatever_json_writes_is_read_back(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    path.write_bytes("".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts).encode())
    assert [json.loads(line) for _, line in json_lines(path, "texts")] == texts


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_no_values(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes("\ufeff1\r\n\r\n \t\n2\n\u2028\n3\r4".encode())
    assert list(json_lines(path, "numbers")) == [(1, "1\r"), (4, "2"), (5, "\u2028"), (6, "3\r4")]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: numbers cannot be read: No such file"):
        list(json_lines(tmp_path / "none.jsonl", "numbers"))
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match=r"bytes\.jsonl: numbers cannot be read"):
        list(json_lines(path, "numbers"))
