"""The points of the benchmark as accuracy checks: relative error against float64 within the contract's 2.0e-3."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from cases import Case
from gpu_kernel import Kernel

from treeverify.bench.workloads import SCALE, Point, load_points, make_pool, make_workload, pool_slots
from treeverify.jit import compiler
from treeverify.jit.modules import module_named, target_for
from treeverify.ops.tree_attention.contract import RELATIVE_ERROR

ANCHORS = Path(__file__).resolve().parents[3] / "benchmarks/anchors/h200-anchors.csv"


def prefix_limit(kernel: Kernel, nodes: int) -> int:
    """Longest prefix that the implementation takes; -1 means any."""
    target = target_for(torch.cuda.get_device_capability(kernel.device))
    library = compiler.load(module_named(f"tree_attention.{kernel.implementation}"), target)
    return int(str(library.function("prefix_limit")(nodes)))


def at_point(kernel: Kernel, point: Point) -> None:
    pool = make_pool(pool_slots([point], 1), kernel.device, seed=1)  # not the seed of q: equal rows are no test
    work = make_workload(point, pool, "scatter", sets=1)
    kv = work.sets[0]
    longest = max(point.prefixes)
    options = {"nodes": point.nodes, "scale": SCALE, "mask": work.mask, "mask_indptr": work.mask_indptr}
    tensors = (work.q, kv.draft_kv, work.pool, work.kv_indptr, kv.prefix_slots)
    case = Case(tensors, {**options, "max_prefix": longest}, point.prefixes, work.visible)
    limit = prefix_limit(kernel, point.nodes)
    if 0 <= limit < longest:
        refused = ""
        try:
            case.run(kernel)
        except ValueError as error:
            refused = str(error)
        assert re.search(f"max_prefix .*: expected <= {limit}, .* got {longest}", refused), refused or "not refused"
    else:
        kernel.matches(case, bound=RELATIVE_ERROR[torch.bfloat16])


CHECKS: dict[str, Callable[[Kernel], None]] = {
    str(point): partial(at_point, point=point) for point in load_points(ANCHORS)
}
