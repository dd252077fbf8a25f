"""Three houses: the product runs without the operator's tool and the laboratory; what is missing is named in a line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from treeverify.cli import extras
from treeverify.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
PRODUCT, OTHERS = CONTRACTS["product"]["source_modules"], CONTRACTS["product"]["forbidden_modules"]
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands}
COMMANDS |= {group.name for group in app.registered_groups}
CALL = ROOT / "tests/data/live_verify_eager.safetensors"
BLOCK = """
import sys
blocked = sys.argv[1].split(",")
class Block:
    def find_spec(name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in blocked):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block)
sys.argv[1:] = sys.argv[2:]
"""


def run(code: str, blocked: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a Python that finds no module of ``blocked``."""
    command = [sys.executable, "-c", BLOCK + code, ",".join(blocked), *arguments]
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("KDTREE_", "TREEVERIFY_F"))}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=settings)


def cli(blocked: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("from treeverify.cli.main import main; main()", blocked, *arguments)


def third_party() -> list[str]:
    return [name for name in OTHERS if not name.startswith("treeverify.")]


def test_every_package_belongs_to_one_house():
    packages = [path.stem for path in (ROOT / "src/treeverify").iterdir() if path.suffix == ".py" or has_python(path)]
    named = [name.split(".")[1] for name in [*PRODUCT, *OTHERS] if name.startswith("treeverify.")]
    assert len(named) == len(set(named))
    assert set(packages) - {"__init__", "__main__"} == set(named)  # of cli the product holds `live`


def has_python(folder: Path) -> bool:
    return folder.is_dir() and (folder / "__init__.py").exists()


def test_the_plugin_its_backend_and_worker_load_without_the_other_houses():
    code = """
import importlib, pkgutil
import treeverify.integrations as package
found = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in found:
    importlib.import_module(name)
print(*found)
"""
    done = run(code, OTHERS)
    assert done.returncode == 0, done.stderr
    for name in ("plugin", "backend", "ddtree.plugin", "ddtree.worker"):
        assert f"treeverify.integrations.sglang.{name}" in done.stdout.split()


def test_the_small_commands_run_without_the_other_houses():
    replayed = cli(OTHERS, "replay", str(CALL), "--device", "cpu", "--json")
    assert (replayed.returncode, replayed.stderr) == (0, "")
    assert json.loads(replayed.stdout)["worse"] is False
    for command in (("probe",), ("mode", "on")):
        done = cli(OTHERS, command[0], "http://127.0.0.1:9", *command[1:])  # nothing listens on the discard port
        assert done.returncode == 2
        assert re.fullmatch(r"treeverify: .*127\.0\.0\.1:9.*\n", done.stderr)
    shown = cli(OTHERS, "--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    ("command", "extra", "install"),
    [
        (("cutover", "status", "--unit", "a.service", "--url", "http://127.0.0.1:9"), "operator", "pip install"),
        (("generate", "x"), "lab", "pip install -e"),
        (("demo",), "lab", "pip install -e"),
        (("serve", "--port", "0"), "lab", "pip install -e"),
        (("bench", "acceptance"), "lab", "pip install -e"),
        (("parity", "law"), "lab", "pip install -e"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_missing_extra_is_named_in_one_line(command, extra, install):
    done = cli(third_party(), *command)
    assert done.returncode == 2
    line = rf'treeverify: {command[0]}: \w+ is missing, which the extra {extra} brings: {install} "\.\[{extra}\]" .*\n'
    assert re.fullmatch(line, done.stderr)


def test_a_module_that_no_extra_brings_is_not_explained_away():
    for command, module in (("demo", "torch"), ("probe", "scipy"), ("demo", "treeverify.engine"), ("cutover", None)):
        assert extras.advice(command, ModuleNotFoundError(name=module)) is None
    done = cli(["treeverify.engine"], "demo")
    assert done.returncode == 1
    assert "No module named 'treeverify.engine" in done.stderr


def test_the_commands_extras_are_those_of_the_project():
    declared = PROJECT["project"]["optional-dependencies"]
    names = {extra: tuple(re.split(r"[<>=!~]", line)[0] for line in declared[extra]) for extra in extras.MODULES}
    assert names == extras.MODULES
    assert set(extras.EXTRA_OF) | {"mode", "probe", "replay"} == COMMANDS
    assert set(extras.MODULES["operator"]) | set(extras.MODULES["lab"]) == set(third_party())
