"""Compiles every specialisation for a list of targets, with no GPU present, and holds each to its resource limits.

    python -m treeverify.jit.aot --targets 80,90a,120 --jobs 4 [--into FOLDER]

``--into`` also copies the libraries there under the names that ``compiler.prebuilt`` looks for: what the wheel ships.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from treeverify.errors import BuildError, TreeverifyError
from treeverify.jit import compiler, resources
from treeverify.jit.modules import COMMON_TARGETS, MODULES, TARGETS, Module, Target, module_named, target_named
from treeverify.jit.toolkit import find_toolkit
from treeverify.jit.units import units_of


@dataclass(frozen=True)
class Built:
    """One library, what its kernels take, and the limits that they break."""

    module: Module
    target: Target
    path: Path
    kernels: tuple[resources.Kernel, ...]
    dynamic_shared: int
    breaches: tuple[str, ...]


def build_all(targets: Sequence[str], modules: Iterable[str] = tuple(MODULES), jobs: int | None = None) -> list[Built]:
    """Build every module for every target, ``jobs`` compilers at a time. Raises ``BuildError`` if one fails."""
    pairs = [(module_named(name), target_named(target)) for target in targets for name in modules]
    units = {(unit, find_toolkit(target)): None for module, target in pairs for unit in units_of(module, target)}
    compiler.compile_units(list(units), jobs)
    return [inspect(module, target) for module, target in pairs]


def inspect(module: Module, target: Target) -> Built:
    """Link (or find) one library and read its resources; the machine needs no device of that target."""
    path = compiler.build(module, target)
    kernels = compiler.report(path)
    library = compiler.open_library(path)
    dynamic = 0 if module.dynamic_kernel is None else library.function("shared_bytes")()
    if not isinstance(dynamic, int):
        raise BuildError(f"{path}: shared_bytes() gave {dynamic!r}")
    return Built(
        module, target, path, tuple(kernels), dynamic, tuple(resources.breaches(module, target, kernels, dynamic))
    )


def ship(built: Iterable[Built], folder: Path) -> list[Path]:
    """Fill ``folder`` with these libraries alone, named by the hash of their sources."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copies = []
    for one in built:
        copies.append(folder / compiler.prebuilt(one.module, one.target).name)
        shutil.copyfile(one.path, copies[-1])
    return copies


def table(built: Iterable[Built]) -> str:
    """One line for each library: registers of the hungriest kernel, shared memory, spills."""
    lines = [f"{'library':34}{'kernels':>8}{'registers':>10}{'static':>8}{'dynamic':>9}{'limit':>8}{'local':>7}"]
    for one in built:
        name = f"{one.module.name} sm_{one.target.name}"
        registers = max(kernel.registers for kernel in one.kernels)
        static = max(kernel.static_shared for kernel in one.kernels)
        local = max(kernel.stack + kernel.spill_stores + kernel.spill_loads for kernel in one.kernels)
        limit = one.module.shared_limit(one.target)
        lines.append(
            f"{name:34}{len(one.kernels):>8}{registers:>10}{static:>8}{one.dynamic_shared:>9}{limit:>8}{local:>7}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, print the table and the breaches; 1 if there is a breach, 2 if something does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(COMMON_TARGETS), help=f"of {','.join(TARGETS)}; or all")
    parser.add_argument("--modules", default=",".join(MODULES), help=f"of {','.join(MODULES)}")
    parser.add_argument("--jobs", type=int, help="compilers at a time; MAX_JOBS, else one per core, unless given")
    parser.add_argument("--into", type=Path, help="copy the libraries into this folder")
    given = parser.parse_args(arguments)
    if given.jobs is not None and given.jobs < 1:
        parser.error(f"--jobs: expected an integer >= 1, got {given.jobs}")
    targets = list(TARGETS) if given.targets == "all" else given.targets.split(",")
    try:
        built = build_all(targets, given.modules.split(","), given.jobs)
    except TreeverifyError as error:
        print(f"treeverify: {error}", file=sys.stderr)
        return 2
    print(table(built))
    for one in built:
        for breach in one.breaches:
            print(f"treeverify: {breach}", file=sys.stderr)
    if given.into is not None:
        ship(built, given.into)
    return 1 if any(one.breaches for one in built) else 0


if __name__ == "__main__":
    sys.exit(main())
