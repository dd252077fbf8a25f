"""What a wheel holds: the code and its small files, no model; the compiled libraries, if they were built before."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from treeverify.jit.modules import MODULES, TARGETS

ROOT = Path(__file__).resolve().parents[1]
MEGABYTE = 1_000_000


@pytest.fixture
def tree(tmp_path):
    """A copy of what a wheel is made from, without libraries."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tmp_path)
    leave = shutil.ignore_patterns("__pycache__", "_prebuilt")
    shutil.copytree(ROOT / "src/treeverify", tmp_path / "src/treeverify", ignore=leave)
    return tmp_path


def build(tree: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out"]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (wheel,) = (tree / "out").iterdir()
    return wheel


def test_without_libraries_it_is_small_pure_and_has_no_model(tree):
    wheel = build(tree)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < MEGABYTE
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    packed = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/treeverify").rglob("*") if path.is_file()}
    expected = {name for name in packed if "__pycache__" not in name and not name.startswith("treeverify/_prebuilt/")}
    model = {name for name in expected if name.startswith("treeverify/assets/")}
    assert {name for name in names if ".dist-info/" not in name} == expected - model
    for name in ("csrc/ops/tree_attention/binding.cc", "cutover/prompts.jsonl", "cli/templates/demo.html.j2"):
        assert f"treeverify/{name}" in names
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {
        "LICENSE",
        "NOTICE",
        "LICENSE-PSF.txt",
    }


def test_libraries_that_were_built_are_carried_for_one_platform(tree):
    libraries = [f"{module}-{target}-0123.so" for module in MODULES for target in TARGETS]
    (tree / "build/prebuilt").mkdir(parents=True)
    for name in libraries:
        (tree / "build/prebuilt" / name).write_bytes(b"code")
    wheel = build(tree)
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as opened:
        found = {name for name in opened.namelist() if name.endswith(".so")}
    assert found == {f"treeverify/_prebuilt/{name}" for name in libraries}


def test_make_wheel_builds_for_every_target():
    recipe = (ROOT / "Makefile").read_text().partition("\nwheel:")[2].partition("\n\n")[0]
    assert "treeverify.jit.aot --targets all --into build/prebuilt" in recipe
