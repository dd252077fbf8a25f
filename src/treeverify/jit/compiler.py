"""Builds a library for a target, once per machine, and loads it; nothing is compiled at import.

Layout of the cache (``env.cache_dir()``): ``objects/<unit>-<key>`` and ``libraries/<module>-<target>-<key>``,
folders whose key hashes sources, flags and compiler versions. A folder is filled under a file lock and its mark, which
holds the size of the product, is written last: a folder without a fitting mark is emptied and built again. So any
number of processes may start at once; one compiles, the others wait. Editing a kernel recompiles its unit and links.

A library that came with the wheel (``treeverify/_prebuilt``) is used if it was built from these very sources.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tvm_ffi
from filelock import FileLock, Timeout

from treeverify.env import cache_dir
from treeverify.errors import BuildError
from treeverify.jit import resources
from treeverify.jit.modules import Module, Target
from treeverify.jit.toolkit import Toolkit, find_toolkit
from treeverify.jit.units import LINK_FLAGS, Unit, digest, library_folder, source_key, units_of

PREBUILT = Path(__file__).resolve().parents[1] / "_prebuilt"
MARK = "complete"
LIBRARY, OBJECT, REPORT, LOG = "library.so", "unit.o", "kernels.json", "log.txt"
_loaded: dict[tuple[str, str], Library] = {}
_loading = threading.Lock()


@dataclass(frozen=True)
class Library:
    """A loaded library: its functions by name."""

    path: Path
    handle: tvm_ffi.Module

    def function(self, name: str) -> Callable[..., object]:
        """Return an exported function."""
        found: Callable[..., object] = self.handle[name]
        return found


def load(module: Module, target: Target) -> Library:
    """Return the library, built first if this machine has not got it yet. Raises ``BuildError``."""
    key = (module.name, target.name)
    with _loading:
        if key not in _loaded:
            _loaded[key] = open_library(locate(module, target))
        return _loaded[key]


def loaded(module: Module, target: Target) -> bool:
    """Has this process loaded the library already?"""
    return (module.name, target.name) in _loaded


def open_library(path: Path) -> Library:
    """Load a library file. Raises ``BuildError`` if the loader refuses it."""
    try:
        return Library(path, tvm_ffi.load_module(str(path)))
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{path} does not load: {error}") from error


def locate(module: Module, target: Target) -> Path:
    """Return the library's path: the shipped one, else the one in the cache, built if it is not there."""
    shipped = prebuilt(module, target)
    return shipped if shipped.is_file() else build(module, target)


def prebuilt(module: Module, target: Target) -> Path:
    """Where a shipped library of exactly these sources would lie."""
    return PREBUILT / f"{module.name}-{target.name}-{source_key(module, target)}.so"


def build(module: Module, target: Target) -> Path:
    """Compile and link what is not in the cache yet; return the library's path. Raises ``BuildError``."""
    toolkit = find_toolkit()
    units = units_of(module, target)
    keys = [unit.build_key(toolkit) for unit in units]
    folder = cache_dir() / "libraries" / f"{module.name}-{target.name}-{digest([*LINK_FLAGS, *keys])}"

    def fill() -> None:
        started = time.monotonic()
        say(f"compiling {module.name} for sm_{target.name} with nvcc {toolkit.version} (once; kept in {folder})")
        with ThreadPoolExecutor(len(units)) as pool:
            objects = list(pool.map(lambda unit: compile_unit(unit, toolkit), units))
        _link(objects, toolkit, folder)
        kernels = [kernel for obj in objects for kernel in resources.parse((obj.parent / LOG).read_text())]
        (folder / REPORT).write_text(json.dumps([kernel.as_dict() for kernel in kernels], indent=1))
        say(f"compiled {module.name} for sm_{target.name} in {time.monotonic() - started:.1f} s")

    return complete(folder, LIBRARY, fill)


def report(library: Path) -> list[resources.Kernel]:
    """Return what the kernels of a built library take."""
    return [resources.Kernel(**fields) for fields in json.loads((library.parent / REPORT).read_text())]


def compile_unit(unit: Unit, toolkit: Toolkit) -> Path:
    """Compile one unit unless the cache has it; return its object file, beside which lies the compiler's log."""
    folder = cache_dir() / "objects" / f"{unit.label}-{unit.build_key(toolkit)}"

    def fill() -> None:
        started = time.monotonic()
        log = _run(unit.command(toolkit, folder / OBJECT), f"{unit.source} does not compile")
        (folder / LOG).write_text(log)
        say(f"  {unit.label}: {time.monotonic() - started:.1f} s")

    return complete(folder, OBJECT, fill)


def complete(folder: Path, product: str, fill: Callable[[], None]) -> Path:
    """Return ``folder/product``, made by ``fill`` under a lock unless the folder's mark says that it is whole."""
    if _is_whole(folder, product):
        return folder / product
    with _locked(folder.name):
        if not _is_whole(folder, product):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            fill()
            partial = folder / f"{MARK}.partial"
            partial.write_text(str((folder / product).stat().st_size))
            partial.rename(folder / MARK)
    return folder / product


def say(text: str) -> None:
    """Progress, on stderr, at once."""
    print(f"treeverify: {text}", file=sys.stderr, flush=True)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock of one cache folder; says so on stderr if another process has it."""
    locks = cache_dir() / "locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{name}.lock")
        try:
            lock.acquire(timeout=1)
        except Timeout:
            say(f"waiting for another process that builds {name}")
            lock.acquire()
    except OSError as error:
        raise BuildError(f"the cache {cache_dir()} cannot be written ({error}); set TREEVERIFY_CACHE") from error
    try:
        yield
    finally:
        lock.release()


def _is_whole(folder: Path, product: str) -> bool:
    try:
        return (folder / MARK).read_text() == str((folder / product).stat().st_size)
    except OSError:
        return False


def _link(objects: list[Path], toolkit: Toolkit, folder: Path) -> None:
    libraries = [
        f"-L{library_folder()}",
        "-ltvm_ffi",
        f"-L{toolkit.library}",
        "-lcudart_static",
        "-ldl",
        "-lrt",
        "-lpthread",
    ]
    command = [str(toolkit.cxx), *LINK_FLAGS, *map(str, objects), *libraries, "-o", str(folder / LIBRARY)]
    _run(command, f"{folder.name} does not link")


def _run(command: list[str], failure: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{failure}:\n{os.linesep.join(done.stdout.splitlines()[-40:])}\ncommand: {' '.join(command)}")
    return done.stdout
