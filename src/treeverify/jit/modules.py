"""The list of compiled libraries as data: targets, and for each specialisation its sources and defines.

The JIT takes one entry for one target, ``aot`` takes all. A library is one specialisation compiled for one target; it
exports plain functions through tvm-ffi. Adding a specialisation is adding an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from treeverify.errors import BuildError


@dataclass(frozen=True)
class Target:
    """One architecture: code for ``sm_<name>``."""

    name: str
    capability: tuple[int, int]
    """The least compute capability that runs it; a later minor number runs it too, unless the name ends in ``a``."""
    shared_limit: int
    """Bytes of shared memory that one block may have after opting in."""

    @property
    def gencode(self) -> str:
        """Return nvcc's option for machine code of this target alone, no PTX."""
        return f"-gencode=arch=compute_{self.name},code=sm_{self.name}"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """May a device of this compute capability run this code?"""
        if self.name.endswith("a"):
            return capability == self.capability
        return capability[0] == self.capability[0] and capability[1] >= self.capability[1]


KIB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target("80", (8, 0), 163 * KIB),
        Target("86", (8, 6), 99 * KIB),
        Target("89", (8, 9), 99 * KIB),
        Target("90a", (9, 0), 227 * KIB),
        Target("100", (10, 0), 227 * KIB),
        Target("120", (12, 0), 99 * KIB),
        Target("121", (12, 1), 99 * KIB),
    )
}
"""In ascending order of capability."""
COMMON_TARGETS = ("80", "90a", "120")
"""What the quick gate compiles; the wheel ships all."""


@dataclass(frozen=True)
class Excuse:
    """Why a kernel may spill or use local memory; without one the resource gate fails."""

    kernel: str
    """A part of the kernel's (mangled) name."""
    reason: str
    targets: tuple[str, ...] = tuple(TARGETS)


@dataclass(frozen=True)
class Module:
    """One specialisation of one operator."""

    name: str
    device_sources: tuple[str, ...]
    """``.cu`` files, relative to ``csrc``; compiled by nvcc, they know no FFI."""
    host_sources: tuple[str, ...]
    """``.cc`` files; compiled by the C++ compiler."""
    dynamic_kernel: str | None
    """A part of the (mangled) name of the kernels that are launched with dynamic shared memory; None: there is none."""
    defines: tuple[str, ...] = ()
    shared_cap: int | None = None
    """Never use more shared memory per block than this, even where the target has more."""
    excuses: tuple[Excuse, ...] = ()

    def shared_limit(self, target: Target) -> int:
        """Bytes of shared memory that a block of this library may have: ``TREEVERIFY_SHARED_LIMIT`` in the sources."""
        return target.shared_limit if self.shared_cap is None else min(self.shared_cap, target.shared_limit)


_ATTENTION = "ops/tree_attention"
_PORTABLE = (f"{_ATTENTION}/portable_launch.cu",)
_BINDING = (f"{_ATTENTION}/binding.cc",)
_TREE_OPS = ("draft_topk", "draft_window", "feature_gather", "kv_compact", "tree_accept", "tree_build", "tree_mask")

MODULES = {
    module.name: module
    for module in (
        Module(
            "tree_attention.naive",
            (f"{_ATTENTION}/naive_launch.cu",),
            _BINDING,
            dynamic_kernel="tree_attention_naive",
            defines=("TREEVERIFY_NAIVE",),
        ),
        Module("tree_attention.portable", _PORTABLE, _BINDING, dynamic_kernel="tree_attention_portable"),
        Module(
            "tree_attention.portable-99k",
            _PORTABLE,
            _BINDING,
            dynamic_kernel="tree_attention_portable",
            shared_cap=99 * KIB,
        ),
        Module(
            "tree_ops",
            tuple(f"ops/{name}/{name}_launch.cu" for name in _TREE_OPS),
            tuple(f"ops/{name}/binding.cc" for name in _TREE_OPS),
            dynamic_kernel=None,
        ),
    )
}


def module_named(name: str) -> Module:
    """Return the entry; raises ``BuildError`` listing the names if there is none."""
    if name not in MODULES:
        raise BuildError(f"no compiled module {name!r}; there are {', '.join(MODULES)}")
    return MODULES[name]


def target_named(name: str) -> Target:
    """Return the target ``80`` .. ``121``; raises ``BuildError`` listing the names if there is none."""
    if name not in TARGETS:
        raise BuildError(f"no target {name!r}; there are {', '.join(TARGETS)}")
    return TARGETS[name]


def target_for(capability: tuple[int, int]) -> Target:
    """Return the highest target that a device of this compute capability runs; raises ``BuildError`` if none does."""
    fitting = [target for target in TARGETS.values() if target.runs_on(capability)]
    if not fitting:
        major, minor = capability
        raise BuildError(f"no kernel for compute capability {major}.{minor}: targets are {', '.join(TARGETS)}")
    return fitting[-1]
