"""Finds the compilers: nvcc with its headers and static runtime, and a C++ compiler. Nothing here runs at import."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from treeverify.env import cuda_home, cxx
from treeverify.errors import BuildError

CONVENTIONAL = Path("/usr/local/cuda")
ADVICE = "install one with `pip install treeverify[build]`, put nvcc on PATH, or set CUDA_HOME"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit and the C++ compiler that goes with it."""

    nvcc: Path
    include: Path
    library: Path
    """Folder of ``libcudart_static.a``: linked in, so that a library needs no CUDA runtime of a given version."""
    version: str
    cxx: Path
    cxx_version: str


@cache
def find_toolkit() -> Toolkit:
    """Return the first of: CUDA_HOME, nvcc on PATH, /usr/local/cuda, the PyPI packages of ``treeverify[build]``.

    Raises ``BuildError`` that says what to install. An explicit CUDA_HOME without nvcc is an error, not skipped.
    """
    root = next(_roots(), None)
    if root is None:
        raise BuildError(f"no CUDA compiler (nvcc) was found: {ADVICE}")
    nvcc = root / "bin" / "nvcc"
    if not nvcc.is_file():
        raise BuildError(f"CUDA_HOME is {root}, which has no bin/nvcc: {ADVICE}")
    library = next((folder for folder in _library_folders(root) if (folder / "libcudart_static.a").is_file()), None)
    if library is None:
        raise BuildError(f"the CUDA toolkit in {root} has no libcudart_static.a: {ADVICE}")
    compiler = shutil.which(cxx() or "g++")
    if compiler is None:
        raise BuildError(f"no C++ compiler {cxx() or 'g++'!r} was found: install g++, or set CXX")
    version = _output([str(nvcc), "--version"])
    release = re.search(r"V(\d+\.\d+\.\d+)", version)
    return Toolkit(
        nvcc=nvcc,
        include=root / "include",
        library=library,
        version=release.group(1) if release else version,
        cxx=Path(compiler),
        cxx_version=_output([compiler, "--version"]).splitlines()[0],
    )


def _roots() -> Iterator[Path]:
    explicit = cuda_home()
    if explicit is not None:
        yield explicit
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield _home_of(on_path)
    candidates = [CONVENTIONAL]
    packages = find_spec("nvidia")
    if packages is not None and packages.submodule_search_locations is not None:
        candidates += [Path(folder) / "cu13" for folder in packages.submodule_search_locations]
    yield from (root for root in candidates if (root / "bin" / "nvcc").is_file())


def _home_of(nvcc: str) -> Path:
    """Ask nvcc itself, as the file on PATH may be a script or a link."""
    top = re.search(r"^#\$ TOP=(.+)$", _output([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"]), re.MULTILINE)
    return Path(top.group(1)).resolve() if top else Path(nvcc).resolve().parents[1]


def _library_folders(root: Path) -> Iterator[Path]:
    for name in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib"):
        yield root / name


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
