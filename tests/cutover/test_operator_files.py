"""What an operator copies: units, as systemd judges them, and alert rules, whose names must be those of the metrics."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from treeverify.control import metrics
from treeverify.cutover.exits import Exit
from treeverify.cutover.quoting import parse_environment_file

DOCS = Path(__file__).parents[2] / "docs"
UNIT = DOCS / "units/sglang-ddtree@.service"
RULES = yaml.safe_load((DOCS / "alerts/treeverify.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]


def verify(text, folder):
    """What systemd says of the unit; its program is one that is here."""
    unit = folder / "sglang-ddtree@kimi-k2.6.service"
    unit.write_text(text.replace("/opt/sglang/bin/python", sys.executable))
    return subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)


@pytest.mark.systemd
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    found = verify(UNIT.read_text(), tmp_path)
    assert found.returncode == 0, found.stderr
    assert "kimi" not in found.stderr, found.stderr
    spoiled = verify(UNIT.read_text().replace("Restart=on-failure", "Restrat=on-failure"), tmp_path)
    assert "Restrat" in spoiled.stderr


def test_the_example_sets_every_variable_of_the_unit_and_nothing_else():
    variables = set(parse_environment_file((DOCS / "units/kimi-k2.6.env").read_text()))
    used = set(re.findall(r"\$\{?([A-Z_]+)", re.sub(r"(?m)^#.*$", "", UNIT.read_text())))
    assert used - variables == {"SGLANG_STAGE_ARGS"}
    assert variables <= used


def test_the_unit_starts_the_plugin_switchable():
    lines = UNIT.read_text().replace("\\\n", " ").splitlines()
    start = shlex.split(next(line for line in lines if line.startswith("ExecStart=")))
    assert start[start.index("--attention-backend") + 1] == "treeverify"
    assert start[start.index("--speculative-algorithm") + 1] == "DDTREE"
    assert "Environment=KDTREE_VERIFY=off KDTREE_VERIFY_ALLOW=off,validate,on" in lines


def test_alerts_are_complete_and_name_metrics_that_exist():
    counters = {f"{name}_total" for name in {*metrics.COUNTERS, *metrics.MODE_COUNTERS}}
    known = counters | {*metrics.GAUGES, metrics.MODE_GAUGE}
    for rule in ALERTS:
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}, rule["alert"]
        named = set(re.findall(r"treeverify_\w+", rule["expr"]))
        assert named, rule["alert"]
        assert named <= known, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert labels <= {"instance", "group", "rank", "mode"}
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)


def test_the_guide_names_every_exit_code():
    text = (DOCS / "use/cutover.md").read_text()
    for code in Exit:
        assert f"| {code.value} |" in text, code
