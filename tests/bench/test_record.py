from __future__ import annotations

import json

import pytest

from treeverify.bench import record
from treeverify.errors import ConfigError


def test_records_survive_the_file(tmp_path, attention_record, ceiling_record):
    path = tmp_path / "new" / "folder" / "records.jsonl"
    written = [attention_record(), attention_record(us=None), ceiling_record()]
    other = {**record.environment(commit="abc"), "benchmark": "tokens", "impl": "tree", "case": {"prompt": 3}}
    written.append({**other, "measures": {"tokens_per_second": 12.5, "acceptance": [1.0, 2.0]}})
    for entry in written:
        record.append(path, entry)
    assert record.read(path) == written
    assert record.read(path, "ceiling") == [written[2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"us": "fast"}, "'us'"),
        ({"us": True}, "'us'"),
        ({"case": {"bs": 1}}, "case lacks 'nodes'"),
        ({"reason": "both set"}, "exactly one"),
        ({"us": None}, "exactly one"),
        ({"us": float("nan")}, "finite"),
        ({"us_runs": [1.0, float("inf")]}, "finite"),
        ({"speed": 3}, "unknown field 'speed'"),
        ({"gpu": 7}, "'gpu'"),
    ],
)
def test_a_record_that_breaks_the_schema_is_refused_and_not_written(tmp_path, attention_record, change, message):
    path = tmp_path / "records.jsonl"
    with pytest.raises(ConfigError, match=message):
        record.append(path, {**attention_record(), **change})
    assert not path.exists()


@pytest.mark.parametrize("name", ["commit", "us_runs", "benchmark", "case"])
def test_a_missing_field_is_named(attention_record, name):
    entry = attention_record()
    del entry[name]
    with pytest.raises(ConfigError, match=name if name != "benchmark" else "missing"):
        record.check(entry)


def test_other_benchmarks_need_measures(attention_record):
    entry = {name: attention_record()[name] for name in record.COMMON} | {"benchmark": "tokens"}
    with pytest.raises(ConfigError, match="measures"):
        record.check(entry)


def test_reading_names_the_line_that_is_no_record(tmp_path, attention_record):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(attention_record()) + '\n\n{"benchmark": "attention"}\n')
    with pytest.raises(ConfigError, match=r"records\.jsonl:3"):
        record.read(path)
    path.write_text("no json\n")
    with pytest.raises(ConfigError, match=r"records\.jsonl:1"):
        record.read(path)
    with pytest.raises(ConfigError, match="no such file"):
        record.read(tmp_path / "absent.jsonl")


def test_the_environment_is_that_of_this_machine():
    here = record.environment()
    assert set(here) == set(record.COMMON) - {"benchmark", "impl", "case"}
    assert here["cpu"]
    assert here["commit"] != ""
    assert record.environment(commit="given")["commit"] == "given"


def test_a_folder_without_git_gives_an_unknown_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.environment()["commit"] == "unknown"
