"""The page of settings is what the code makes, and misses no variable that is read."""

from __future__ import annotations

import ast
import importlib.util
import inspect

import pytest
from tests.docs.prose import ROOT

from treeverify import env

SCRIPT = ROOT / "scripts/settings_page.py"


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("settings_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_makes(made):
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), f"run python {SCRIPT.relative_to(ROOT)}"


def test_every_variable_that_is_read_stands_on_the_page(made):
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(env))) if isinstance(node, ast.Call)]
    texts = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    read = {text for text in texts if isinstance(text, str) and text.isupper() and text.isascii() and len(text) > 2}
    assert {"KDTREE_VERIFY", "TREEVERIFY_CACHE", "CXX", "XDG_CACHE_HOME"} <= read
    assert [name for name in sorted(read) if name not in made.page()] == []


def test_rows_say_where_a_setting_is_and_what_its_default_is(made):
    rows = made.page().splitlines()
    assert "| `KDTREE_DUMP_MAX` | environment | dump files per rank in `KDTREE_DUMP_DIR`, default 8. |" in rows
    assert "| `--dry-run` | `cutover run` | Print the plan; change nothing. |" in rows
    assert "| `--rounds` | `bench attention` | Interleaved rounds of each point. Default: 5. |" in rows
    assert any(row.startswith("| `--unit` | `cutover run`, `cutover status`, `cutover rollback` |") for row in rows)
    assert any(row.startswith("| `MODE` | `mode` | off \\| validate \\| on. Required. |") for row in rows)
