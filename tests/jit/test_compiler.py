"""The cache: built once, by one process, whole or not at all; an edit recompiles what it touches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trivial

from treeverify.errors import BuildError
from treeverify.jit import compiler, units
from treeverify.jit.modules import Module
from treeverify.jit.toolkit import find_toolkit

HERE = Path(__file__).parent


def compiled(capsys) -> list[str]:
    """The units that were compiled since the last call, by name."""
    lines = capsys.readouterr().err.splitlines()
    return sorted(line.split(":")[1].strip() for line in lines if line.startswith("treeverify:   "))


def test_first_build_shows_progress_and_the_second_does_nothing(csrc, capsys):
    path = compiler.build(trivial.MODULE, trivial.TARGET)
    text = capsys.readouterr().err
    assert "compiling trivial for sm_90a" in text
    assert "compiled trivial for sm_90a in" in text
    stamp = path.stat().st_mtime_ns
    assert compiler.build(trivial.MODULE, trivial.TARGET) == path
    assert path.stat().st_mtime_ns == stamp
    assert capsys.readouterr().err == ""


def test_an_edit_recompiles_only_what_includes_it(csrc, capsys):
    first = compiler.build(trivial.MODULE, trivial.TARGET)
    assert compiled(capsys) == ["one", "two"]
    (csrc / "ops/value.h").write_text("#pragma once\nconstexpr int kValue = 8;\n")
    second = compiler.build(trivial.MODULE, trivial.TARGET)
    assert compiled(capsys) == ["one"]
    assert second != first
    assert first.is_file()


def test_eight_processes_at_once_compile_once(csrc, tmp_path):
    environment = {**os.environ, "TREEVERIFY_CACHE": str(tmp_path / "shared")}
    command = [sys.executable, str(HERE / "trivial.py"), str(csrc)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    results = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, results
    assert len({out for out, _ in results}) == 1
    progress = "".join(err for _, err in results)
    assert progress.count("compiling trivial") == 1
    assert progress.count("  one: ") == 1


@pytest.mark.parametrize("damage", ["no mark", "no product", "cut product", "empty folder"])
@pytest.mark.parametrize("kind", ["libraries", "objects"])
def test_a_folder_that_is_not_whole_is_built_again(csrc, tmp_path, damage, kind):
    path = compiler.build(trivial.MODULE, trivial.TARGET)
    whole = path.read_bytes()
    folders = list((tmp_path / "cache" / kind).iterdir())
    if kind == "objects":
        shutil.rmtree(path.parent)
    for folder in folders:
        product = folder / (compiler.LIBRARY if kind == "libraries" else compiler.OBJECT)
        if damage == "no mark":
            (folder / compiler.MARK).unlink()
            product.write_bytes(b"half a file")
        elif damage == "no product":
            product.unlink()
        elif damage == "cut product":
            product.write_bytes(product.read_bytes()[:100])
        else:
            shutil.rmtree(folder)
            folder.mkdir()
    assert compiler.build(trivial.MODULE, trivial.TARGET) == path
    assert path.read_bytes() == whole


def test_a_failed_build_leaves_no_mark_and_names_file_and_error(csrc, tmp_path):
    (csrc / "ops/two.cc").write_text("int two() { return undeclared; }\n")
    with pytest.raises(BuildError, match=r"ops/two.cc does not compile:[\s\S]*undeclared[\s\S]*command: "):
        compiler.build(trivial.MODULE, trivial.TARGET)
    assert not list((tmp_path / "cache/libraries").glob(f"*/{compiler.MARK}"))
    trivial_source = 'extern "C" int two() { return 2; }\n'
    (csrc / "ops/two.cc").write_text(trivial_source)
    assert compiler.build(trivial.MODULE, trivial.TARGET).is_file()


def test_a_cache_that_cannot_be_written_is_named(csrc, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREEVERIFY_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot be written.*set TREEVERIFY_CACHE"):
        compiler.build(trivial.MODULE, trivial.TARGET)


def test_keys_follow_sources_flags_and_versions(csrc):
    toolkit = find_toolkit()
    unit = units.units_of(trivial.MODULE, trivial.TARGET)[0]
    keys = {unit.build_key(toolkit)}
    keys.add(units.Unit(unit.source, ("MORE",), None).build_key(toolkit))
    keys.add(units.Unit(unit.source, (), trivial.TARGET).build_key(toolkit))
    before = units.source_key(trivial.MODULE, trivial.TARGET)
    (csrc / "ops/value.h").write_text("#pragma once\nconstexpr int kValue = 9;\n")
    keys.add(unit.build_key(toolkit))
    assert len(keys) == 4
    assert units.source_key(trivial.MODULE, trivial.TARGET) != before


def test_a_shipped_library_is_used_if_its_sources_are_these(csrc, tmp_path, monkeypatch):
    opened: list[Path] = []
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "shipped")
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "open_library", opened.append)
    shipped = compiler.prebuilt(trivial.MODULE, trivial.TARGET)
    shipped.parent.mkdir()
    shipped.write_bytes(b"")
    compiler.load(trivial.MODULE, trivial.TARGET)
    assert opened == [shipped]
    monkeypatch.setattr(compiler, "_loaded", {})
    (csrc / "ops/value.h").write_text("#pragma once\nconstexpr int kValue = 1;\n")
    compiler.load(trivial.MODULE, trivial.TARGET)
    assert opened[1].is_relative_to(tmp_path / "cache")


def test_a_library_that_does_not_load_is_a_build_error(tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no ELF")
    with pytest.raises(BuildError, match=r"broken\.so does not load"):
        compiler.open_library(tmp_path / "broken.so")


def test_an_unknown_source_is_not_hidden():
    with pytest.raises(FileNotFoundError):
        units.source_key(Module("gone", (), ("ops/gone.cc",), dynamic_kernel=""), trivial.TARGET)
