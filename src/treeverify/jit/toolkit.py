"""Finds the compilers: nvcc with its headers and static runtime, and a C++ compiler. Nothing here runs at import."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from treeverify.env import cuda_home, cxx, search_path
from treeverify.errors import BuildError
from treeverify.jit.cache import CacheError, complete, digest, folder_of, say
from treeverify.jit.modules import Target

CONVENTIONAL = Path("/usr/local/cuda")
PACKAGE = "cuda-toolkit[nvcc,cccl,cudart]==13.0.*"
"""CUDA's own packages on PyPI, as the extra ``build`` has them."""
ADVICE = f"install one with `pip install '{PACKAGE}'`, or put nvcc on PATH"
HEADER, RUNTIME = "cuda_runtime.h", "libcudart_static.a"
TRIAL = """\
#include <cuda_bf16.h>
#include <cuda_runtime.h>
__global__ void trial(__nv_bfloat16* value) { *value = __float2bfloat16(1.0f); }
extern "C" int treeverify_trial() { trial<<<1, 1>>>(nullptr); return cudaGetLastError(); }
"""
_SETTING = re.compile(r"^#\$ (\w+)=(.*)$", re.MULTILINE)
_HEADER_FOUND = re.compile(rf'^# 1 "(.+/{re.escape(HEADER)})"', re.MULTILINE)
_SHELL = '$`"'
"""nvcc hands its arguments, and its scratch files' names, to a shell within double quotes."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit and the C++ compiler that goes with it."""

    nvcc: Path
    include: Path
    """Folder of ``cuda_runtime.h``."""
    library: Path
    """Folder of ``libcudart_static.a``: linked in, so that a library needs no CUDA runtime of a given version."""
    version: str
    """nvcc's version, with the options that NVCC_PREPEND_FLAGS and NVCC_APPEND_FLAGS give it, if any."""
    cxx: Path
    cxx_version: str

    def device_command(self, *arguments: str) -> list[str]:
        """Return nvcc's command, our C++ compiler behind it. Raises ``BuildError`` for a path that nvcc garbles."""
        command = [str(self.nvcc), "-ccbin", str(self.cxx), *arguments]
        texts = [*(("the argument", argument) for argument in command), ("TMPDIR", tempfile.gettempdir())]
        for what, text in texts:
            if any(character in text for character in _SHELL):
                raise BuildError(f"nvcc cannot read {what} {text}: its shell would expand one of {_SHELL}")
        return command

    def link_command(self, *arguments: str) -> list[str]:
        """Return the C++ compiler's command that links the CUDA runtime behind ``arguments``."""
        runtime = [f"-L{self.library}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        return [str(self.cxx), *arguments, *runtime]


@cache
def find_toolkit(target: Target | None = None) -> Toolkit:
    """Return the first toolkit that works: of CUDA_HOME alone if it is set; else nvcc on PATH, /usr/local/cuda, PyPI's.

    A toolkit works if its nvcc answers and its headers and its runtime are found; with a target, also if it compiles
    and links a small kernel for it (once, kept in the cache). One that does not is passed over, said on stderr.
    Raises ``BuildError`` with every reason if none works, ``CacheError`` if the cache cannot be written.
    """
    candidates = list(_candidates())
    if not candidates:
        raise BuildError(f"no CUDA compiler (nvcc) was found: {ADVICE}, or set CUDA_HOME")
    compiler, compiler_version = _find_cxx()
    reasons = []
    for nvcc in candidates:
        try:
            toolkit = _read(nvcc, compiler, compiler_version)
            if target is not None:
                _try(toolkit, target)
        except CacheError:
            raise
        except BuildError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            say(f"passed over: {reason}")
        return toolkit
    advice = f"mend CUDA_HOME, or unset it and {ADVICE}" if cuda_home() else f"{ADVICE}, or set CUDA_HOME"
    raise BuildError("\n".join(["no CUDA toolkit works:", *reasons, f"what helps: {advice}"]))


def run(command: list[str], failure: str) -> str:
    """Return what a compiler printed; raises ``BuildError`` with ``failure`` and the end of its words."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BuildError(f"{failure}: {error}") from error
    if done.returncode != 0:
        words = "\n".join(done.stdout.splitlines()[-40:])
        raise BuildError(f"{failure}:\n{words}\nexit code {done.returncode} of the command: {shlex.join(command)}")
    return done.stdout


def _candidates() -> Iterator[Path]:
    """Every nvcc, each once, in the order in which they are tried; an explicit CUDA_HOME without one is an error."""
    home = cuda_home()
    if home is not None:
        if not (home / "bin" / "nvcc").is_file():
            raise BuildError(f"CUDA_HOME is {home}, which has no bin/nvcc: mend it, or unset it and {ADVICE}")
        yield home / "bin" / "nvcc"
        return
    packages = find_spec("nvidia")
    places = None if packages is None else packages.submodule_search_locations
    roots = [CONVENTIONAL, *(Path(place) / "cu13" for place in places or ())]
    folders = [*search_path(), *(str(root / "bin") for root in roots)]
    found = [shutil.which("nvcc", path=folder) for folder in folders if folder]
    seen = set()
    for path in (Path(path).absolute() for path in found if path is not None):
        # nvcc looks for its headers beside itself, and so does not find them from a link: its file comes next.
        for nvcc in (path, path.resolve()):
            place = nvcc.parent.resolve() / nvcc.name
            if nvcc.name == "nvcc" and place not in seen:
                seen.add(place)
                yield nvcc


def _read(nvcc: Path, compiler: Path, compiler_version: str) -> Toolkit:
    """Ask nvcc itself where it has its headers and libraries: toolkits are laid out in many ways."""
    command = [str(nvcc), "-ccbin", str(compiler)]
    answer = dict(_SETTING.findall(run([*command, "--dryrun", "-E", "-x", "cu", "/dev/null"], f"{nvcc} does not run")))
    headers = shlex.split(f"{answer.get('INCLUDES', '')} {answer.get('SYSTEM_INCLUDES', '')}")
    lookup = [str(compiler), "-E", *headers, "-x", "c++", "-include", HEADER, "/dev/null"]
    header = _HEADER_FOUND.search(run(lookup, f"{nvcc}: the headers of its toolkit do not compile"))
    if header is None:
        raise BuildError(f"{nvcc}: {compiler} does not say where {HEADER} is")
    folders = [word.removeprefix("-L") for word in shlex.split(answer.get("LIBRARIES", ""))]
    if "TOP" in answer:
        folders.append(f"{answer['TOP']}/lib")  # PyPI's packages, of whose libraries nvcc does not know
    own = run([str(compiler), f"-print-file-name={RUNTIME}"], f"{compiler} does not run").strip()
    folders.append(str(Path(own).parent))
    library = next((folder for folder in folders if Path(folder, RUNTIME).is_file()), None)
    if library is None:
        raise BuildError(f"{nvcc}: its toolkit has no {RUNTIME} in {', '.join(folders)}")
    text = run([str(nvcc), "--version"], f"{nvcc} does not run")
    release = re.search(r"V(\d+\.\d+\.\d+)", text)
    options = [answer[name] for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS") if name in answer]
    return Toolkit(
        nvcc=nvcc,
        include=Path(header.group(1).replace('\\"', '"').replace("\\\\", "\\")).resolve().parent,
        library=Path(library).resolve(),
        version=" ".join([release.group(1) if release else text.strip(), *options]),
        cxx=compiler,
        cxx_version=compiler_version,
    )


def _try(toolkit: Toolkit, target: Target) -> None:
    """Compile and link a small kernel for the target, unless that is known to work; raises ``BuildError``."""
    folder = folder_of("trials", f"{target.name}-{digest([repr(toolkit)])}")

    def fill() -> None:
        source, unit = folder / "trial.cu", folder / "trial.o"
        source.write_text(TRIAL)
        options = ["-std=c++17", "-Xcompiler=-fPIC", target.gencode, "-c", str(source), "-o", str(unit)]
        failure = f"{toolkit.nvcc} with {toolkit.cxx} does not compile for sm_{target.name}"
        run(toolkit.device_command(*options), failure)
        link = ["-shared", "-Wl,--no-undefined", str(unit), "-o", str(folder / "trial.so")]
        run(toolkit.link_command(*link), f"{toolkit.nvcc}: its runtime does not link")

    complete(folder, "trial.so", fill)


def _find_cxx() -> tuple[Path, str]:
    """Return the C++ compiler and its version. Words behind a first one (``ccache g++``) are kept in a script.

    nvcc takes a single path for its compiler, and both are to compile with the same words.
    """
    text = cxx() or "g++"
    words = [text] if shutil.which(text) else _words(text)
    program = shutil.which(words[0])
    if program is None:
        raise BuildError(f"no C++ compiler {words[0]!r} was found: install g++, or set CXX")
    program = str(Path(program).absolute())
    version = run([program, *words[1:], "--version"], f"the C++ compiler {text!r} does not run").strip()
    first = version.splitlines()[0] if version else ""
    if len(words) == 1:
        return Path(program), first
    line = shlex.join([program, *words[1:]])
    folder = folder_of("compilers", digest([line]))

    def fill() -> None:
        (folder / "c++").write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (folder / "c++").chmod(0o755)

    return complete(folder, "c++", fill), f"{first} ({text})"


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BuildError(f"CXX: expected a command, got {text!r}: {error}") from error
    if not words:
        raise BuildError(f"CXX: expected a command, got {text!r}")
    return words
