from __future__ import annotations

import json

import pytest

from treeverify.bench.roofline import COLUMNS, Results, main, page
from treeverify.bench.roofline_plot import draw
from treeverify.errors import ConfigError

SMALL, LARGE = (1, 9, 8, 131072), (16, 17, 128, 16384)


@pytest.fixture
def records(attention_record, ceiling_record):
    return [
        ceiling_record(),
        ceiling_record("mma-sync", 6.0e14, "flop/s"),
        attention_record("treeverify-portable", 999.0, SMALL),
        attention_record("treeverify-portable", 50.0, SMALL),
        attention_record("treeverify-portable", 51.0, SMALL, "contig"),
        attention_record("treeverify-portable", 2100.0, LARGE, bound="mma"),
        attention_record("triton-extend", 25000.0, SMALL),
        attention_record("triton-extend", 4200.0, LARGE),
        attention_record("fa2-mla", None, SMALL, reason="ImportError: no package"),
        attention_record("fa2-mla", None, LARGE, reason="ImportError: no package"),
        attention_record("flashmla-causal", 75.0, SMALL, "page64"),
        attention_record("flashmla-causal", 1050.0, LARGE, "page64"),
        attention_record("treeverify-naive", None, SMALL, reason="ContractError: too long"),
        attention_record("treeverify-naive", 42000.0, LARGE),
    ]


def row(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_says_what_the_records_say(records):
    text = page(records, "attention-roofline.svg")
    header = row(text, "point | floor")
    small = dict(zip(header, row(text, "1/9/8/128k | 25.0 me"), strict=True))
    assert small["treeverify-portable"] == "50.0 (2.0)"  # the later record counts
    assert small["treeverify-portable contig"] == "51.0 (2.0)"
    assert small["treeverify-naive"] == "-"
    assert small["flashmla-causal page64"] == "75.0 (3.0)"
    assert "fa2-mla" not in header
    versus = row(text, "treeverify-portable | triton-extend")
    assert versus[2:] == ["2.00x (16/17/128/16k)", "251.00x", "500.00x (1/9/8/128k)", "2 of 2"]
    assert row(text, "treeverify-portable | flashmla-causal")[-1] == "1 of 2"
    share = row(text, "16/17/128/16k | treeverify-portable")
    assert share[2:5] == ["mm", "180", "592"]
    assert share[-1] == "99%"
    assert "- fa2-mla at all points: ImportError: no package" in text
    assert "- treeverify-naive at 1/9/8/128k: ContractError: too long" in text
    assert "![Roofline](attention-roofline.svg)" in text


def test_the_page_states_what_was_not_measured(records):
    text = " ".join(page(records).split())
    assert "NVIDIA H200, driver 580.0" in text
    assert "1.7-4.2x over its naive baseline on an RTX PRO 6000 (sm_120), and 3-6x end to end" in text
    assert "compiled and resource-checked, not measured" in text


def test_a_point_that_a_later_run_left_out_keeps_its_figure(records, attention_record):
    late = attention_record("treeverify-portable", None, SMALL, reason="not run: the time budget of 1 s was spent")
    assert Results.of([*records, late]).us(next(iter(Results.of(records).cells)), COLUMNS[0]) == 50.0


def test_the_plot_is_small_and_reproducible(records, tmp_path):
    first, second, picture = tmp_path / "a.svg", tmp_path / "b.svg", tmp_path / "c.png"
    for path in (first, second, picture):
        draw(records, path)
        assert 1000 < path.stat().st_size < 200_000
    assert first.read_bytes() == second.read_bytes()


def test_no_records_are_an_error(ceiling_record, tmp_path):
    with pytest.raises(ConfigError, match="no attention records"):
        page([ceiling_record()])
    with pytest.raises(ConfigError, match="no measured"):
        draw([ceiling_record()], tmp_path / "x.svg")


def test_the_command_writes_page_and_plot(records, tmp_path):
    source = tmp_path / "records.jsonl"
    source.write_text("".join(json.dumps(entry) + "\n" for entry in records))
    main([str(source), "--page", str(tmp_path / "page.md"), "--plot", str(tmp_path / "img" / "plot.svg")])
    assert "](img/plot.svg)" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "img" / "plot.svg").exists()
