"""Programs that stand for compilers."""

from __future__ import annotations

import shutil
from pathlib import Path

SYSTEM = "/usr/local/bin:/usr/bin:/bin"
"""What a PATH is on most machines; the programs here have it whatever the test's PATH is."""
GXX = shutil.which("g++")
VERSION = "Cuda compilation tools, release 13.0, V13.0.88"


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nPATH={SYSTEM}\n{text}\n")
    path.chmod(0o755)
    return path


def cxx(path: Path) -> Path:
    """The real g++ under another path."""
    return script(path, f'exec {GXX} "$@"')


def toolkit(root: Path, library: str = "lib") -> Path:
    """A toolkit whose nvcc says where its headers and libraries are, and compiles nothing."""
    settings = [
        f"TOP={root}/bin/..",
        f'INCLUDES="-I{root}/include"',
        f'LIBRARIES="-L{root}/lib64/stubs" "-L{root}/lib64"',
    ]
    lines = "\n".join(f"#$ {setting}" for setting in settings)
    script(root / "bin/nvcc", f"case \"$*\" in *--dryrun*) cat <<'END'\n{lines}\nEND\n;; *) echo '{VERSION}';; esac")
    for folder in ("include", library):
        (root / folder).mkdir()
    (root / "include/cuda_runtime.h").write_text("#pragma once\n")
    (root / library / "libcudart_static.a").write_text("")
    return root
