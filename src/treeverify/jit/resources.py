"""Reads ptxas' report and holds each kernel to its limits: a gate, not a log.

``ptxas -v`` says for each kernel its registers, its static shared memory, its stack frame and its spills. The dynamic
shared memory is known to the launch code only, so a library states it itself (the function ``shared_bytes``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from treeverify.jit.modules import Module, Target

_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class Kernel:
    """What one kernel takes; bytes, but for ``registers`` per thread."""

    name: str
    registers: int = 0
    static_shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0

    def as_dict(self) -> dict[str, str | int]:
        """Return the fields, for a report."""
        return asdict(self)


def parse(report: str) -> list[Kernel]:
    """Read the kernels out of the text that ``ptxas -v`` wrote; called device functions count for their kernel."""
    kernels: list[Kernel] = []
    for line in report.splitlines():
        entry, stack, used = _ENTRY.search(line), _STACK.search(line), _USED.search(line)
        if entry:
            kernels.append(Kernel(entry.group(1)))
        elif stack and kernels:
            kernel = kernels[-1]
            frame, stores, loads = (int(value) for value in stack.groups())
            kernel.stack = max(kernel.stack, frame)
            kernel.spill_stores += stores
            kernel.spill_loads += loads
        elif used and kernels:
            shared = _SHARED.search(line)
            kernels[-1].registers = int(used.group(1))
            kernels[-1].static_shared = int(shared.group(1)) if shared else 0
    return kernels


def breaches(module: Module, target: Target, kernels: Iterable[Kernel], dynamic_shared: int) -> list[str]:
    """Return one line for each limit that this library breaks for this target; none if all is well.

    ``dynamic_shared`` is the most that any launch of ``module.dynamic_kernel`` asks for, on top of its static part.
    """
    limit = module.shared_limit(target)
    found = []
    kernels = list(kernels)
    if not kernels:
        found.append("no kernel in ptxas' report")
    for kernel in kernels:
        dynamic = dynamic_shared if module.dynamic_kernel is not None and module.dynamic_kernel in kernel.name else 0
        shared = kernel.static_shared + dynamic
        if shared > limit:
            parts = f"{kernel.static_shared} static + {dynamic} dynamic"
            found.append(f"{kernel.name}: {shared} bytes of shared memory ({parts}), limit {limit}")
        local = kernel.stack or kernel.spill_stores or kernel.spill_loads
        excused = any(excuse.kernel in kernel.name and target.name in excuse.targets for excuse in module.excuses)
        if local and not excused:
            spills = f"{kernel.spill_stores} + {kernel.spill_loads} bytes of spills"
            found.append(f"{kernel.name}: {kernel.stack} bytes of stack, {spills}, and no reason in jit/modules.py")
    return [f"{module.name} for sm_{target.name}: {line}" for line in found]
