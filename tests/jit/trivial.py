"""A library that compiles in a fraction of a second: two host units, one header, no FFI. Also a program: build it."""

from __future__ import annotations

import sys
from pathlib import Path

from treeverify.jit.modules import TARGETS, Module

MODULE = Module("trivial", (), ("ops/one.cc", "ops/two.cc"), dynamic_kernel="none")
TARGET = TARGETS["90a"]


def write(folder: Path) -> Path:
    (folder / "ops").mkdir(parents=True)
    (folder / "ops/value.h").write_text("#pragma once\nconstexpr int kValue = 7;\n")
    (folder / "ops/one.cc").write_text('#include "ops/value.h"\nextern "C" int one() { return kValue; }\n')
    (folder / "ops/two.cc").write_text('extern "C" int two() { return 2; }\n')
    return folder


if __name__ == "__main__":
    from treeverify.jit import compiler, units

    units.CSRC = Path(sys.argv[1])
    print(compiler.build(MODULE, TARGET))
