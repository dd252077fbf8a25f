"""One translation unit of a library: its command, and the hash of everything that can change its object file."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tvm_ffi
from tvm_ffi import libinfo

from treeverify.jit.cache import digest
from treeverify.jit.modules import Module, Target
from treeverify.jit.toolkit import Toolkit

CSRC = Path(__file__).resolve().parents[1] / "csrc"
NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
)
CXX_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
LINK_FLAGS = ("-shared", "-Wl,--no-undefined", "-Wl,--exclude-libs,ALL", "-s")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """A source file with its defines; ``target`` is None for host code, which is the same for every target."""

    source: str
    defines: tuple[str, ...]
    target: Target | None

    @property
    def label(self) -> str:
        """Return a name for folders and progress: ``portable_launch-90a``."""
        return Path(self.source).stem + (f"-{self.target.name}" if self.target else "")

    def flags(self) -> list[str]:
        """Every option that shapes the machine code, none that names a place."""
        defines = [f"-D{define}" for define in self.defines]
        if self.target is None:
            return [*CXX_FLAGS, *defines]
        return [*NVCC_FLAGS, self.target.gencode, *defines]

    def command(self, toolkit: Toolkit, target_file: Path) -> list[str]:
        """Compile to ``target_file``."""
        if self.target is None:
            # Not -isystem for the toolkit's headers: where they lie in /usr/include, that would hide the C library's.
            places = [f"-isystem{libinfo.find_include_path()}", f"-I{toolkit.include}"]
            return [str(toolkit.cxx), *self.flags(), *places, *self._files(target_file)]
        return toolkit.device_command(*self.flags(), *self._files(target_file))

    def source_key(self) -> str:
        """Hash of sources, flags and the CPU's architecture: the same on every machine of that architecture."""
        return digest([platform.machine(), *self.flags(), *_closure(CSRC / self.source)])

    def build_key(self, toolkit: Toolkit) -> str:
        """``source_key`` and the versions of what compiles it."""
        compilers = [toolkit.cxx_version, toolkit.version if self.target else tvm_ffi.__version__]
        return digest([self.source_key(), *compilers])

    def _files(self, target_file: Path) -> list[str]:
        return [f"-I{CSRC}", "-c", str(CSRC / self.source), "-o", str(target_file)]


def units_of(module: Module, target: Target) -> list[Unit]:
    """Return the translation units of a library, the slow ones first."""
    limit = f"TREEVERIFY_SHARED_LIMIT={module.shared_limit(target)}"
    device = [Unit(source, (*module.defines, limit), target) for source in module.device_sources]
    return device + [Unit(source, module.defines, None) for source in module.host_sources]


def source_key(module: Module, target: Target) -> str:
    """Hash of all but the compilers that shapes this library: how a shipped one is recognised."""
    return digest([*LINK_FLAGS, *(unit.source_key() for unit in units_of(module, target))])


def _closure(source: Path) -> list[str]:
    """Names and texts of a source and of all headers of ``csrc`` that it reaches, sorted by name."""
    found: dict[str, str] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        name = str(path.relative_to(CSRC))
        if name in found:
            continue
        found[name] = text = path.read_text()
        waiting += [path for include in _INCLUDE.findall(text) if (path := CSRC / include).is_file()]
    return [f"{name}\0{text}" for name, text in sorted(found.items())]


@cache
def library_folder() -> Path:
    """Return the folder of ``libtvm_ffi.so``."""
    return Path(libinfo.find_libtvm_ffi()).parent
