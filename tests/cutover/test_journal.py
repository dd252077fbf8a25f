"""The journal: what a kill leaves, what a hand leaves, and what must not be mistaken for the other."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeverify.cutover import journal as module
from treeverify.cutover.exits import Exit
from treeverify.cutover.journal import Journal
from treeverify.errors import CutoverError


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(5):
        journal.append("run", "enter", "validate", number=number, text='ü\n"quoted"')
    return path


def test_what_was_appended_is_read_back_and_appending_goes_on(written):
    journal = Journal(written)
    assert [record.data["number"] for record in journal.records] == [0, 1, 2, 3, 4]
    assert [record.seq for record in journal.records] == [1, 2, 3, 4, 5]
    journal.append("run", "end", "done")
    assert Journal(written).records[-1].event == "end"
    assert journal.records == Journal(written).records


def test_every_cut_of_the_last_line_is_torn_and_every_whole_line_kept(written):
    content = written.read_bytes()
    begin = content.rindex(b"\n", 0, -1) + 1
    for size in range(begin + 1, len(content)):
        written.write_bytes(content[:size])
        journal = Journal(written)
        assert journal.torn
        assert len(journal.records) == 4
    journal.append("run", "enter", "soak")
    again = Journal(written)
    assert not again.torn
    assert [record.stage for record in again.records] == ["validate"] * 4 + ["soak"]


def test_zeros_after_the_last_line_are_a_torn_line_too(written):
    written.write_bytes(written.read_bytes() + bytes(512))
    assert Journal(written).torn
    assert len(Journal(written).records) == 5


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_any_changed_byte_before_the_last_line_is_refused(tmp_path_factory, where, flip):
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    journal = Journal(path)
    for number in range(3):
        journal.append("run", "enter", "off", number=number)
    content = bytearray(path.read_bytes())
    where %= content.rindex(b"\n", 0, -1)
    content[where] ^= flip
    path.write_bytes(content)
    with pytest.raises(CutoverError, match="line") as caught:
        Journal(path)
    assert caught.value.exit_code == Exit.JOURNAL_CORRUPT


@pytest.mark.parametrize("to", [b" ", b"\t", b"\r", b"\n", b"0", b"\xff", None])
def test_each_byte_counts_white_space_too(tmp_path, to):
    """Of every line, the last line's end included; ``to`` None: another byte whatever it was."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(2):
        journal.append("run", "enter", "off", number=number, text="a b")
    whole = path.read_bytes()
    for where, old in enumerate(whole):
        new = to or bytes([old ^ 1])
        if new[0] == old:
            continue
        path.write_bytes(whole[:where] + new + whole[where + 1 :])
        with pytest.raises(CutoverError, match=r"line [12] is not as it was written") as caught:
            Journal(path)
        assert caught.value.exit_code == Exit.JOURNAL_CORRUPT


@pytest.mark.parametrize("added", [b" ", b"\t", b"\r"])
def test_white_space_that_was_added_counts(written, added):
    line = written.read_bytes().index(b"\n")
    for where in (0, 10, line):
        whole = written.read_bytes()
        written.write_bytes(whole[:where] + added + whole[where:])
        with pytest.raises(CutoverError, match="line 1 is not as it was written"):
            Journal(written)
        written.write_bytes(whole)


def test_a_journal_whose_checksums_left_white_space_out_is_refused_by_name(tmp_path):
    """As earlier versions wrote them: keys in order, the checksum of the record written anew."""
    path = tmp_path / "journal.jsonl"
    record = {"seq": 1, "at": "", "run": "r", "event": "begin", "stage": "off", "data": {}}
    body = json.dumps(record, sort_keys=True)
    checksum = hashlib.sha256(f"\n{body}".encode()).hexdigest()[:16]
    path.write_text(json.dumps({"sum": checksum, "record": record}, sort_keys=True) + "\n")
    with pytest.raises(
        CutoverError, match=r"line 1 was written by an earlier treeverify; nothing was changed"
    ) as caught:
        Journal(path)
    assert caught.value.exit_code == Exit.JOURNAL_CORRUPT


@pytest.mark.parametrize("spoil", ["drop", "swap", "repeat", "edit"])
def test_lines_that_were_moved_lost_or_edited_are_refused(written, spoil):
    lines = written.read_bytes().splitlines(keepends=True)
    if spoil == "drop":
        del lines[2]
    elif spoil == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    elif spoil == "repeat":
        lines.insert(2, lines[1])
    else:
        lines[2] = lines[2].replace(b'"validate"', b'"done"')
    written.write_bytes(b"".join(lines))
    before = written.read_bytes()
    with pytest.raises(CutoverError, match=r"line [234] is not as it was written") as caught:
        Journal(written)
    assert caught.value.exit_code == Exit.JOURNAL_CORRUPT
    assert written.read_bytes() == before


def test_each_record_is_on_the_disk_before_append_returns(tmp_path, monkeypatch):
    path, synced = tmp_path / "journal.jsonl", []
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    Journal(path).append("run", "begin", "off")
    assert synced[0] == path.stat().st_size
    assert len(synced) == 2  # the file, and the folder that names it


def test_a_record_that_could_not_be_written_does_not_count(written, monkeypatch):
    journal = Journal(written)
    real = os.write

    def full(descriptor, content):
        real(descriptor, content[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        journal.append("run", "enter", "on")
    monkeypatch.undo()
    assert len(journal.records) == len(Journal(written).records) == 5
    journal.append("run", "enter", "on")
    assert Journal(written).records[-1].stage == "on"


def test_lines_are_plain_json(written):
    first = json.loads(written.read_text().splitlines()[0])
    assert set(first) == {"sum", "record"}
    assert first["record"]["stage"] == "validate"
