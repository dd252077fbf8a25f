"""The gate reads ptxas' words and holds each kernel to its target's limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treeverify.jit.modules import TARGETS, Excuse, module_named
from treeverify.jit.resources import Kernel, breaches, parse

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firsti' for 'sm_90a'
ptxas info    : Function properties for _Z5firsti
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2336 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 537.446 ms
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90a'
ptxas info    : Function properties for _Z6secondv
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
ptxas info    : Function properties for _Z6calledv
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
MODULE = module_named("tree_attention.portable-99k")
FINE = Kernel("smxx_bf16_tree_attention_portable", registers=200, static_shared=1376)


def test_parse():
    first, second = parse(REPORT)
    assert first == Kernel("_Z5firsti", 40, 2336, 0, 0, 0)
    assert second == Kernel("_Z6secondv", 255, 0, 16, 4, 12)


def test_at_the_limit_passes_and_one_more_byte_does_not():
    assert breaches(MODULE, TARGETS["120"], [FINE], 100_000) == []
    (line,) = breaches(MODULE, TARGETS["120"], [FINE], 100_001)
    assert "101377 bytes of shared memory (1376 static + 100001 dynamic), limit 101376" in line
    assert "tree_attention.portable-99k for sm_120" in line


def test_a_cap_binds_where_the_target_has_more():
    assert breaches(MODULE, TARGETS["90a"], [FINE], 100_001)
    assert not breaches(module_named("tree_attention.portable"), TARGETS["90a"], [FINE], 200_000)


def test_dynamic_memory_counts_for_its_own_kernel_only():
    merge = Kernel("smxx_bf16_tree_attention_merge", static_shared=11_392)
    assert not breaches(MODULE, TARGETS["120"], [FINE, merge], 100_000)


@pytest.mark.parametrize("field", ["stack", "spill_stores", "spill_loads"])
def test_local_memory_needs_a_reason(field):
    kernel = replace(FINE, **{field: 8})
    (line,) = breaches(MODULE, TARGETS["80"], [kernel], 0)
    assert "no reason in jit/modules.py" in line
    excused = replace(MODULE, excuses=(Excuse("portable", "measured: off the hot path", ("80",)),))
    assert not breaches(excused, TARGETS["80"], [kernel], 0)
    assert breaches(excused, TARGETS["120"], [kernel], 0)


def test_a_report_without_kernels_fails():
    assert breaches(MODULE, TARGETS["80"], parse("nothing"), 0)
