"""Rules of docs/architecture.md that import-linter cannot see."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
CSRC = ROOT / "src/treeverify/csrc"
MAX_LINES, MAX_KERNEL_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 300, 500, 60, 12


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("module", ["treeverify", "treeverify.tree", "treeverify.kvpool.plan", "treeverify.cli.main"])
def test_importing_is_free_of_torch(module):
    assert run_python(f"import sys, {module}; print('torch' in sys.modules)").strip() == "False"


def test_importing_the_operators_needs_no_toolkit_and_creates_nothing(tmp_path):
    code = f"import os; os.environ.update(PATH='', TREEVERIFY_CACHE={str(tmp_path / 'c')!r}); import treeverify.ops"
    run_python(code)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES, f"{path}: over {MAX_LINES} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            doc = ast.get_docstring(node, clean=False)
            length -= len(doc.splitlines()) if doc else 0
            assert length <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {length} lines without its docstring"
            command = any(isinstance(d, ast.Call) and "command" in ast.dump(d.func) for d in node.decorator_list)
            count = 0 if command else len(node.args.args) + len(node.args.kwonlyargs)  # a command's are its options
            assert count <= MAX_PARAMETERS, f"{path}: {node.name} has {count} parameters"


def test_kernel_files_stay_small():
    for path in [p for p in CSRC.rglob("*") if p.is_file()]:
        assert len(path.read_text().splitlines()) <= MAX_KERNEL_LINES, f"{path}: over {MAX_KERNEL_LINES} lines"


def test_every_module_has_a_docstring():
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path}: no module docstring"


def included(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line.split(None, 1)[1].strip("<>\"'") for line in lines if line.startswith("#include")]


def test_csrc_includes_follow_the_layers():
    for path in [p for p in CSRC.rglob("*") if p.is_file()]:
        headers = included(path)
        assert not [h for h in headers if h.startswith(("torch/", "ATen/", "c10/"))], f"{path}: a torch header"
        if path.suffix in {".cuh", ".cu"}:
            assert not [h for h in headers if "tvm/" in h or "host/" in h], f"{path}: device code includes the FFI"
        if path.name == "binding.cc":
            assert not [h for h in headers if h.endswith(".cuh")], f"{path}: a binding includes device code"


def test_no_example_has_a_deadline():
    assert settings().deadline is None
    timed = [path for path in sorted((ROOT / "tests").rglob("*.py")) if "deadline=" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in timed] == ["tests/architecture/test_rules.py", "tests/conftest.py"]
