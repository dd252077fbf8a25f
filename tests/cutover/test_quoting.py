"""systemd's notations; tests/cutover/test_systemd_units.py asks systemd itself about the same texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeverify.cutover.quoting import environment_file, parse_environment_file, split_words

SHOWN = [
    ("", []),
    ("A=1 B=2", ["A=1", "B=2"]),
    ('"A=b c" KDTREE_VERIFY=off', ["A=b c", "KDTREE_VERIFY=off"]),
    (r'"Q=he said \"x\" \\ \$HOME \`t\`" C=', ['Q=he said "x" \\ $HOME `t`', "C="]),
    (r'"N=a\nb" "T=a\tb" "X=\x1b\001" U=ü', ["N=a\nb", "T=a\tb", "X=\x1b\x01", "U=ü"]),
    ('"S=it\'s"', ["S=it's"]),
]

FILES = {
    "plain": ("KDTREE_VERIFY=on\n", "on"),
    "no end": ("KDTREE_VERIFY=on", "on"),
    "last wins": ("KDTREE_VERIFY=off\nKDTREE_VERIFY=on\n", "on"),
    "blanks": ("  KDTREE_VERIFY  =  on  \n", "on"),
    "tabs and returns": ("\tKDTREE_VERIFY=\ton\t\r\n", "on"),
    "comments": ("# KDTREE_VERIFY=off\n; KDTREE_VERIFY=off\nKDTREE_VERIFY=on\n#KDTREE_VERIFY=off\n", "on"),
    "hash inside": ("KDTREE_VERIFY=on # off\n", "on # off"),
    "double quotes": ('KDTREE_VERIFY="on"\n', "on"),
    "single quotes": ("KDTREE_VERIFY='on'\n", "on"),
    "single keep": ("KDTREE_VERIFY='o\\n \"$x'\n", 'o\\n "$x'),
    "double escapes": ('KDTREE_VERIFY="a\\"b\\\\c\\$d\\`e\\nf"\n', 'a"b\\c$d`e\\nf'),
    "joined": ("KDTREE_VERIFY='o'\"n\"\n", "on"),
    "joined with blanks": ("KDTREE_VERIFY='o'   n  \n", "on"),
    "quote inside a word": ('KDTREE_VERIFY=o"n"\n', 'o"n"'),
    "continued": ("KDTREE_VERIFY=o\\\nn\n", "on"),
    "continued in quotes": ('KDTREE_VERIFY="o\\\nn"\n', "on"),
    "line end in quotes": ('KDTREE_VERIFY="o\nn"\n', "o\nn"),
    "escaped blank": ("KDTREE_VERIFY=on\\ \n", "on "),
    "escaped letter": ("KDTREE_VERIFY=\\on\n", "on"),
    "empty": ("KDTREE_VERIFY=\n", ""),
    "no equals": ("KDTREE_VERIFY\nKDTREE_VERIFY=on\nrubbish\n", "on"),
    "another name": ("XKDTREE_VERIFY=off\nKDTREE_VERIFY=on\nKDTREE_VERIFY_ALLOW=off\n", "on"),
    "equals in the value": ("KDTREE_VERIFY=a=b\n", "a=b"),
    "open quote at the end": ("KDTREE_VERIFY='on\n", "on\n"),
    "empty file": ("", None),
}


@pytest.mark.parametrize(("printed", "words"), SHOWN, ids=range(len(SHOWN)))
def test_words_of_systemctl_show(printed, words):
    assert split_words(printed) == words


@pytest.mark.parametrize("name", FILES)
def test_environment_files(name):
    text, value = FILES[name]
    assert parse_environment_file(text).get("KDTREE_VERIFY") == value


values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.dictionaries(st.from_regex("[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), values))
def test_what_is_written_is_read_back(variables):
    assert parse_environment_file(environment_file(variables)) == variables


@given(st.text())
def test_no_text_is_too_odd_to_parse(text):
    assert all(isinstance(value, str) for value in parse_environment_file(text).values())
