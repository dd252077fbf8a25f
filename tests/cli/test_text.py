"""Text that comes in and goes out: what is not UTF-8 is refused by name, what an encoding lacks is escaped."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from treeverify.cli import generate
from treeverify.cli.main import main
from treeverify.errors import ConfigError
from treeverify.text import escaped, read_text, whole

LATIN_1 = "def café():".encode("latin-1")


@pytest.mark.parametrize(
    "text", ["", "plain", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{GRINNING FACE}", "\x00\ufffd"]
)
def test_whole_text_is_left_as_it_is(text):
    assert whole("field", text) == text
    assert escaped(text) == text


@pytest.mark.parametrize(("text", "found"), [("x \ud83d y", r"'\ud83d' at character 2"), ("\udce9", r"'\udce9'")])
def test_a_lone_surrogate_is_refused_by_name_and_escaped_in_a_message(text, found):
    with pytest.raises(ConfigError) as refused:
        whole("field", text)
    assert str(refused.value).startswith(f"field: expected text in UTF-8, got {found}")
    assert escaped(text).isascii()


def test_a_file_is_utf_8_whatever_the_locale(tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes("é".encode())
    assert read_text("name", file) == "é"
    file.write_bytes(LATIN_1)
    with pytest.raises(ConfigError, match=r"^name: 'utf-8' codec can't decode byte 0xe9 in position 7"):
        read_text("name", file)
    with pytest.raises(ConfigError, match=r"^name: .*Is a directory"):
        read_text("name", tmp_path)


def command(*arguments, stdin=subprocess.DEVNULL, given=None, **settings):
    """The command as a process, with bytes in and out."""
    return subprocess.run(
        [sys.executable, "-m", "treeverify", *arguments],
        env=os.environ | settings,
        capture_output=True,
        check=False,
        **({"stdin": stdin} if given is None else {"input": given}),
    )


@pytest.mark.parametrize("settings", [{}, {"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
@pytest.mark.parametrize("place", ["argument", "stdin", "file"])
def test_a_prompt_in_latin_1_is_one_line_that_names_where_it_came_from(tmp_path, place, settings):
    file = tmp_path / "prompt"
    file.write_bytes(LATIN_1)
    if place == "argument":
        done, words = command("generate", LATIN_1, **settings), b"treeverify: PROMPT: "
    elif place == "stdin":
        done, words = command("generate", "--file", "-", given=LATIN_1, **settings), b"treeverify: --file: -: "
    else:
        done, words = command("generate", "--file", str(file), **settings), f"treeverify: --file: {file}: ".encode()
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(words)
    assert done.stderr.count(b"\n") == 1


def test_a_closed_standard_input_is_one_line():
    script = 'exec "$0" -m treeverify generate --file - <&-'
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"treeverify: --file: -: ")
    assert done.stderr.count(b"\n") == 1


class Output(io.TextIOWrapper):
    """A standard output of some encoding that keeps its bytes."""

    def __init__(self, encoding):
        super().__init__(io.BytesIO(), encoding=encoding)

    @property
    def written(self):
        self.flush()
        return self.buffer.getvalue()


@pytest.fixture
def run_into(monkeypatch):
    """Run ``treeverify ARGUMENTS`` with a standard output of ``encoding``; returns the bytes written."""

    def call(encoding, *arguments):
        out = Output(encoding)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "argv", ["treeverify", *arguments])
        with suppress(SystemExit):
            main()
        return out.written

    return call


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", rb"caf\xe9 \u2190 \U0001f600"),
        ("latin-1", b"caf\xe9 \\u2190 \\U0001f600"),
        ("cp1252", b"caf\xe9 \\u2190 \\U0001f600"),
        ("utf-8", "café ← \N{GRINNING FACE}".encode()),
    ],
)
def test_a_streamed_text_is_escaped_where_the_encoding_lacks_a_character(run_into, monkeypatch, encoding, expected):
    class Told:
        def __init__(self, _):
            self.rest = iter("café ← \N{GRINNING FACE}")

        def feed(self, _):
            return next(self.rest, "")

        def flush(self):
            return "".join(self.rest)

    monkeypatch.setattr(generate, "StreamDecoder", Told)
    assert run_into(encoding, "generate", "x", "--max-new-tokens", "8") == expected


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--prompts", "1", "--new-tokens", "8"),
        ("demo", "--prompts", "1", "--new-tokens", "8", "--json"),
        ("generate", "# é", "--temperature", "8", "--seed", "1", "--max-new-tokens", "32"),
        ("generate", "# é", "--temperature", "8", "--seed", "1", "--max-new-tokens", "32", "--json"),
        ("--help",),
        ("cutover", "run", "--help"),
    ],
)
def test_no_command_fails_at_an_encoding(run_into, encoding, arguments):
    assert run_into(encoding, *arguments).isascii() or encoding != "ascii"
