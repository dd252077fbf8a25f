"""The cache: built once, by one process, whole or not at all; an edit recompiles what it touches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trivial

from treeverify.errors import BuildError
from treeverify.jit import cache, compiler, units
from treeverify.jit.cache import MARK
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


DAMAGE = ["no mark", "no product", "cut product", "zeros", "zeros in the log", "zeros everywhere", "empty folder"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["libraries", "objects"])
def test_a_folder_that_is_not_whole_is_built_again(csrc, tmp_path, damage, kind):
    path = compiler.build(trivial.MODULE, trivial.TARGET)
    whole = path.read_bytes()
    folders = list((tmp_path / "cache" / kind).iterdir())
    if kind == "objects":
        shutil.rmtree(path.parent)
    for folder in folders:
        product = folder / (compiler.LIBRARY if kind == "libraries" else compiler.OBJECT)
        log = folder / (compiler.REPORT if kind == "libraries" else compiler.LOG)
        hurt = {"zeros": [product], "zeros in the log": [log], "zeros everywhere": [product, log, folder / MARK]}
        if damage == "no mark":
            (folder / MARK).unlink()
            product.write_bytes(b"half a file")
        elif damage == "no product":
            product.unlink()
        elif damage == "cut product":
            product.write_bytes(product.read_bytes()[:100])
        elif damage == "empty folder":
            shutil.rmtree(folder)
            folder.mkdir()
        for file in hurt.get(damage, []):
            file.write_bytes(bytes(file.stat().st_size))
    assert compiler.build(trivial.MODULE, trivial.TARGET) == path
    assert path.read_bytes() == whole
    assert json.loads((path.parent / compiler.REPORT).read_text()) == []


def test_a_failed_build_leaves_no_mark_and_names_file_and_error(csrc, tmp_path):
    (csrc / "ops/two.cc").write_text("int two() { return undeclared; }\n")
    with pytest.raises(BuildError, match=r"ops/two.cc does not compile:[\s\S]*undeclared[\s\S]*command: "):
        compiler.build(trivial.MODULE, trivial.TARGET)
    assert not list((tmp_path / "cache/libraries").glob(f"*/{MARK}"))
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


def test_keys_hold_the_cpus_architecture(csrc, monkeypatch):
    toolkit = find_toolkit()
    built, shipped, objects = set(), set(), set()
    for machine in ("x86_64", "aarch64", "ppc64le"):
        monkeypatch.setattr(units.platform, "machine", lambda machine=machine: machine)
        built.add(compiler.build(trivial.MODULE, trivial.TARGET))
        shipped.add(compiler.prebuilt(trivial.MODULE, trivial.TARGET))
        objects.add(compiler.compile_unit(units.units_of(trivial.MODULE, trivial.TARGET)[0], toolkit))
    assert (len(built), len(shipped), len(objects)) == (3, 3, 3)


def reseal(path):
    """A file that is not what it should be, in a folder whose mark says that it is whole."""
    path.write_bytes(b"\x7fELF of another machine")
    (path.parent / MARK).write_text(cache._checksum(path.parent))


def test_a_cached_library_that_does_not_load_is_built_again_once(csrc, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "_loaded", {})
    path = compiler.build(trivial.MODULE, trivial.TARGET)
    whole = path.read_bytes()
    reseal(path)
    compiled(capsys)
    assert compiler.load(trivial.MODULE, trivial.TARGET).path == path
    assert path.read_bytes() == whole
    text = capsys.readouterr().err
    assert "library.so does not load" in text
    assert "it is built anew" in text
    assert [text.count(f"  {unit}: ") for unit in ("one", "two")] == [1, 1]
    monkeypatch.setattr(compiler, "_loaded", {})
    assert compiler.load(trivial.MODULE, trivial.TARGET).path == path
    assert capsys.readouterr().err == ""


def test_one_that_does_not_load_after_that_is_an_error(csrc, monkeypatch, capsys):
    tried = []

    def refuse(path):
        tried.append(path)
        raise OSError("undefined symbol")

    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler.tvm_ffi, "load_module", refuse)
    with pytest.raises(BuildError, match=r"library\.so does not load: undefined symbol"):
        compiler.load(trivial.MODULE, trivial.TARGET)
    assert len(tried) == 2
    assert not compiler.loaded(trivial.MODULE, trivial.TARGET)


def test_what_another_process_has_built_again_is_left_alone(csrc):
    path = compiler.build(trivial.MODULE, trivial.TARGET)
    seen = cache.stamp(path.parent)
    assert cache.discard(path.parent, seen)
    assert compiler.build(trivial.MODULE, trivial.TARGET) == path
    assert not cache.discard(path.parent, seen)
    assert cache.stamp(path.parent) is not None


def test_a_shipped_library_that_does_not_load_is_compiled_instead(csrc, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "shipped")
    monkeypatch.setattr(compiler, "_loaded", {})
    shipped = compiler.prebuilt(trivial.MODULE, trivial.TARGET)
    shipped.parent.mkdir()
    shipped.write_bytes(bytes(1000))
    assert compiler.load(trivial.MODULE, trivial.TARGET).path.is_relative_to(tmp_path / "cache")
    assert f"{shipped} does not load" in capsys.readouterr().err
    assert shipped.read_bytes() == bytes(1000)


@pytest.mark.parametrize(("text", "jobs"), [("1", 1), ("3", 3), ("", 5), (None, 5)])
def test_compilers_at_a_time(csrc, monkeypatch, text, jobs):
    pools = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers):
            pools.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(compiler, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(5)))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    if text is not None:
        monkeypatch.setenv("MAX_JOBS", text)
    compiler.build(trivial.MODULE, trivial.TARGET)
    compiler.compile_units([], 7)
    assert pools == [jobs, 7]


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
