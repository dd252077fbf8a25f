"""What is wrong before a cutover begins: one clear line, an exit code of its own, nothing changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.ports import free_port
from typer.testing import CliRunner

from treeverify.cli.cutover import app
from treeverify.control.client import switch_mode
from treeverify.cutover.journal import Record, _encode
from treeverify.cutover.lock import hold
from treeverify.env import VerifyMode


def snapshot(bench):
    files = {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file() and path.name != "lock"}
    return files, bench.modes(), bench.pid()


@pytest.fixture
def served(bench):
    bench.boot()
    return bench


def refuse(bench, outcome, code, *said):
    """``outcome`` has the code and one line that says why."""
    assert outcome.code == code, outcome.out
    assert len(outcome.out.strip().splitlines()) == 1, outcome.out
    assert outcome.out.startswith("treeverify: ")
    for text in said:
        assert text in outcome.out


def test_nothing_listens_at_the_port(served):
    before = snapshot(served)
    port = free_port()
    url, served.url = served.url, f"http://127.0.0.1:{port}"
    refuse(served, served.run(), 12, str(port))
    served.url = url
    assert snapshot(served) == before


def test_an_address_that_is_none(served):
    before = snapshot(served)
    url, served.url = served.url, "localhost"
    refuse(served, served.run(), 12, "http://HOST:PORT")
    served.url = url
    assert snapshot(served) == before


def test_a_server_without_the_plugin(bench):
    bench.base["STUB_PLUGIN"] = "0"
    bench.boot()
    refuse(bench, bench.run(), 13, "plugin", "--allow-restart")
    refuse(bench, bench.run("on", "--dry-run"), 13, "plugin")
    assert not bench.state.exists()
    assert not bench.owned.exists()


def test_a_server_that_may_not_be_switched(bench):
    bench.base = {}
    bench.boot()
    before = snapshot(bench)
    refuse(bench, bench.run(), 14, "switched to off only", "validate, on")
    assert snapshot(bench) == before


def test_a_user_who_may_not_write(served):
    before = snapshot(served)
    with TemporaryDirectory() as name:
        public = Path(name)
        public.chmod(0o755)
        for path in served.folder.glob("*.json*"):
            (public / path.name).write_text(path.read_text().replace(str(served.folder), name))
        served.state = public / "state"
        refused = served.run("on", "--settings", str(public / "settings.json"), uid=65534)
        refuse(served, refused, 11, "cannot be written by user 65534")
        assert not served.state.exists()
    assert snapshot(served) == before


def test_the_journal_of_another_unit(served):
    assert served.run().code == 0
    before = snapshot(served)
    other = [word if word != "stub" else "other" for word in served.options()]
    for what in (["run", "--to", "off"], ["rollback"], ["status"]):
        refuse(served, served.driver("cutover", *what, *other), 15, "stub, not of other")
    assert snapshot(served) == before


def test_a_corrupted_journal(served):
    assert served.run().code == 0
    path = served.state / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b"validate", b"on", 1)
    path.write_bytes(b"".join(lines))
    before = snapshot(served)
    for outcome in (served.run("off"), served.rollback(), served.driver("cutover", "status", *served.options())):
        refuse(served, outcome, 16, "line 5", "nothing was changed")
    assert snapshot(served) == before


def encoded(records):
    """A journal of these records, written anew with right checksums."""
    lines, previous = [], ""
    for record in records:
        line, previous = _encode(Record(**record), previous)
        lines.append(f"{line}\n")
    return "".join(lines)


OTHER_VERSIONS = {
    "a field more": lambda records: records[0]["data"]["plan"].update(added=1),
    "a field less": lambda records: records[0]["data"].pop("before"),
    "no plan": lambda records: records[0]["data"].pop("plan"),
    "no data": lambda records: records[0].update(data=None),
    "another stage": lambda records: records[1].update(stage="warm-up"),
}


@pytest.mark.parametrize("change", OTHER_VERSIONS.values(), ids=OTHER_VERSIONS)
def test_a_journal_of_another_version(served, change):
    assert served.run().code == 0
    records = served.records()
    change(records)
    (served.state / "journal.jsonl").write_text(encoded(records))
    before = snapshot(served)
    for outcome in (served.run("off"), served.rollback(), served.driver("cutover", "status", *served.options())):
        refuse(served, outcome, 16, f"line {2 if records[1]['stage'] == 'warm-up' else 1}", "version")
    assert snapshot(served) == before


def test_a_journal_that_is_nested_beyond_reading(served):
    served.state.mkdir()
    (served.state / "journal.jsonl").write_text("[" * 100_000 + "\n")
    refuse(served, served.run(), 16, "line 1")


def test_a_folder_that_is_a_file_and_a_file_that_is_a_folder(served):
    before = snapshot(served)
    served.state = served.folder / "base.env"
    for outcome in (served.run(), served.rollback()):
        refuse(served, outcome, 11, "base.env is not a folder")
    served.state, owned = served.folder / "state", served.owned
    served.owned = served.folder / "base.env" / "owned.env"
    refuse(served, served.run(), 11, "base.env is not a folder")
    served.owned = owned
    owned.mkdir()
    refuse(served, served.run(), 11, "owned.env: is a folder")
    owned.rmdir()
    assert snapshot(served) == before


def test_a_mode_that_the_start_gets_from_elsewhere(bench):
    """The owned file does not say it, so the next start would not be what it says, nor what a rollback proves."""
    bench.base["KDTREE_VERIFY"] = "validate"
    bench.boot()
    switch_mode(bench.url, VerifyMode.OFF)
    before = snapshot(bench)
    for outcome in (bench.run("on"), bench.run("off"), bench.run("on", "--dry-run")):
        refuse(bench, outcome, 14, "KDTREE_VERIFY=validate", "owned.env is not there")
    assert "KDTREE_VERIFY=validate" in bench.status()["doubt"]
    assert snapshot(bench) == before


def test_a_second_operator(served):
    served.state.mkdir()
    before = snapshot(served)
    with hold(served.state / "lock"):
        for outcome in (served.run(), served.rollback()):
            refuse(served, outcome, 17, f"user {os.getuid()} on", f"process {os.getpid()}")
    assert snapshot(served) == before


def test_a_file_that_is_not_ours(served):
    served.owned.write_text("KDTREE_VERIFY=off\n")
    before = snapshot(served)
    refuse(served, served.run(), 18, str(served.owned))
    assert snapshot(served) == before


def test_wrong_options(served):
    before = snapshot(served)
    refuse(served, served.run("maybe"), 2, "--to", "off, validate, on")
    refuse(served, served.run("on", "--eager", "NOVALUE", "--allow-restart"), 2, "--eager", "NAME=VALUE")
    refuse(served, served.run("on", "--eager", "A=1"), 2, "--allow-restart")
    refuse(served, served.run("validate", "--eager", "A=1", "--allow-restart"), 2, "eager", "target")
    unit = served.driver("cutover", "status", "--unit", "no-suffix", "--url", served.url)
    refuse(served, unit, 2, "NAME.service")
    (served.folder / "settings.json").write_text(json.dumps({"speed": 1}))
    refuse(served, served.run(), 2, "settings.json", "speed")
    (served.folder / "settings.json").write_text("")
    refuse(served, served.run(), 2, "settings.json")
    after = snapshot(served)
    assert {**after[0], **before[0]} == before[0]
    assert after[1:] == before[1:]


def test_a_dry_run_prints_the_plan_and_touches_nothing(served):
    before = snapshot(served)
    outcome = served.run("on", "--dry-run")
    assert outcome.code == 0
    assert [line.split(":")[0] for line in outcome.out.splitlines()][2:7] == [
        "1. off",
        "2. validate",
        "3. soak for 0 s",
        "4. on",
        "5. unit",
    ]
    assert snapshot(served) == before
    assert not served.state.exists()


def test_nothing_to_do_and_nothing_to_roll_back(served):
    assert "nothing to roll back" in served.rollback().last
    assert not served.state.exists()
    assert "nothing to do" in served.run("off").last
    assert "nothing to roll back" in served.rollback().last
    assert served.records() == []


def soaking(served):
    """A run in its soak, as a process of its own."""
    settings = ["--settings", str(served.folder / "settings.json"), "--soak", "60", "--to", "on"]
    words = [sys.executable, "-c", WAITING, "cutover", "run", *served.options(), *settings]
    started = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not served.records() or served.records()[-1]["stage"] != "soak":
        assert started.poll() is None
        time.sleep(0.2)
    return started


def test_a_signal_rolls_back(served):
    started = soaking(served)
    started.send_signal(signal.SIGTERM)
    said = started.communicate()[1]
    assert started.returncode == 22, said
    assert "SIGTERM" in said
    assert served.modes() == ("off", "off")
    assert served.records()[-1]["stage"] == "rolled-back"


def test_only_what_changes_something_catches_signals(served, monkeypatch):
    """A status or a plan that waits for a server that hangs ends at once."""
    caught = []
    monkeypatch.setattr(signal, "signal", lambda number, _: caught.append(number))
    options, to = served.options(), ["--to", "off"]
    for words in (["status", *options], ["run", *options, *to, "--dry-run"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert caught == []
    for words in (["run", *options, *to], ["rollback", *options]):
        assert CliRunner().invoke(app, words).exit_code == 0
        assert set(caught) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        caught.clear()


def test_a_terminal_that_is_gone_does_not_stop_the_rollback(served):
    started = soaking(served)
    started.stderr.close()
    started.send_signal(signal.SIGHUP)
    started.wait()
    assert served.modes() == ("off", "off")
    assert served.records()[-1]["stage"] == "rolled-back"


WAITING = """
from tests.cutover import driver
driver.samples.collect, driver.gates.judge = driver.collect, driver.judge_all_but(None)
driver.report.write = lambda path, *rest: path
driver.main()
"""
