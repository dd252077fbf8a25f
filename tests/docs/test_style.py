"""The pages stay readable: short sentences, short pages, short cells, nothing that only their authors understand."""

from __future__ import annotations

import re

import pytest
from tests.docs.prose import PAGES, ROOT, cells, sentences, without_code, words

MEAN_WORDS = 17.0
LONG = 30
LONG_SHARE = 0.08
PAGE_LINES = 250
CELL_WORDS = 40
HASH = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b")
CASE_CODE = re.compile(r"\b[GF]\d{1,2}\b")
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}


def test_sentences_are_counted_as_stated():
    text = (
        "# No heading\n\nOne two three. Four `a.b` [five six](x.md)\nseven; eight: 1.5 ms of it.\n\n"
        "- An item that ends\n- Another one here (see above.) And more to say\n\n| no | table |\n\n"
        "```\nno code here at all.\n```\nToo short.\n"
    )
    assert [words(piece) for piece in sentences(text)] == [3, 10, 4, 5, 4]


def test_sentences_are_short():
    counts = [words(sentence) for text in TEXTS.values() for sentence in sentences(text)]
    assert sum(counts) / len(counts) <= MEAN_WORDS
    assert sum(count > LONG for count in counts) / len(counts) <= LONG_SHARE


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_is_short_and_so_are_its_cells(name):
    assert len(TEXTS[name].splitlines()) <= PAGE_LINES
    assert [cell for cell in cells(TEXTS[name]) if words(cell) > CELL_WORDS] == []


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_names_no_commit_and_no_case_code(name):
    text = without_code(TEXTS[name])
    assert HASH.findall(text) == []
    assert CASE_CODE.findall(text) == []
