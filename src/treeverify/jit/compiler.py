"""Builds a library for a target, once per machine, and loads it; nothing is compiled at import.

Layout of the cache (``env.cache_dir()``): ``objects/<unit>-<key>`` and ``libraries/<module>-<target>-<key>``,
folders (``jit.cache``) whose key hashes sources, flags, compiler versions and the CPU's architecture; beside them what
``jit.toolkit`` found out. Editing a kernel recompiles its unit and links. A library that does not load is built anew,
once.

A library that came with the wheel (``treeverify/_prebuilt``) is used if it was built from these very sources.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tvm_ffi

from treeverify.env import build_jobs
from treeverify.errors import BuildError
from treeverify.jit import resources
from treeverify.jit.cache import complete, digest, discard, folder_of, say, stamp
from treeverify.jit.modules import Module, Target
from treeverify.jit.toolkit import Toolkit, find_toolkit, run
from treeverify.jit.units import LINK_FLAGS, Unit, library_folder, source_key, units_of

PREBUILT = Path(__file__).resolve().parents[1] / "_prebuilt"
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
            _loaded[key] = _open(module, target)
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
    toolkit = find_toolkit(target)
    units = units_of(module, target)
    keys = [unit.build_key(toolkit) for unit in units]
    folder = folder_of("libraries", f"{module.name}-{target.name}-{digest([*LINK_FLAGS, *keys])}")

    def fill() -> None:
        started = time.monotonic()
        say(f"compiling {module.name} for sm_{target.name} with nvcc {toolkit.version} (once; kept in {folder})")
        objects = compile_units([(unit, toolkit) for unit in units])
        _link(objects, toolkit, folder)
        kernels = [kernel for obj in objects for kernel in resources.parse((obj.parent / LOG).read_text())]
        (folder / REPORT).write_text(json.dumps([kernel.as_dict() for kernel in kernels], indent=1))
        say(f"compiled {module.name} for sm_{target.name} in {time.monotonic() - started:.1f} s")

    return complete(folder, LIBRARY, fill)


def report(library: Path) -> list[resources.Kernel]:
    """Return what the kernels of a built library take."""
    return [resources.Kernel(**fields) for fields in json.loads((library.parent / REPORT).read_text())]


def compile_units(pairs: Sequence[tuple[Unit, Toolkit]], jobs: int | None = None) -> list[Path]:
    """Compile the units that the cache has not, ``jobs`` at a time (``MAX_JOBS``); return their object files."""
    with ThreadPoolExecutor(jobs or build_jobs()) as pool:
        return list(pool.map(lambda pair: compile_unit(*pair), pairs))


def compile_unit(unit: Unit, toolkit: Toolkit) -> Path:
    """Compile one unit unless the cache has it; return its object file, beside which lies the compiler's log."""
    folder = _object_folder(unit, toolkit)

    def fill() -> None:
        started = time.monotonic()
        log = run(unit.command(toolkit, folder / OBJECT), f"{unit.source} does not compile")
        (folder / LOG).write_text(log)
        say(f"  {unit.label}: {time.monotonic() - started:.1f} s")

    return complete(folder, OBJECT, fill)


def _open(module: Module, target: Target) -> Library:
    """Load the library; one that does not load is built here, once, its objects too."""
    path = locate(module, target)
    seen = stamp(path.parent)
    try:
        return open_library(path)
    except BuildError as error:
        say(f"{error}; it is built anew")
    if path.parent != PREBUILT and discard(path.parent, seen):
        toolkit = find_toolkit(target)
        for unit in units_of(module, target):
            objects = _object_folder(unit, toolkit)
            discard(objects, stamp(objects))
    return open_library(build(module, target))


def _object_folder(unit: Unit, toolkit: Toolkit) -> Path:
    return folder_of("objects", f"{unit.label}-{unit.build_key(toolkit)}")


def _link(objects: list[Path], toolkit: Toolkit, folder: Path) -> None:
    inputs = [*map(str, objects), f"-L{library_folder()}", "-ltvm_ffi", "-o", str(folder / LIBRARY)]
    run(toolkit.link_command(*LINK_FLAGS, *inputs), f"{folder.name} does not link")
