"""Every check of the tree operators on every implementation: pure core, references, emulated CUDA code, a GPU."""

from __future__ import annotations

import importlib

import gpu_step
import pytest
import torch
from emulated import Emulated, compile_library
from tree_implementations import Api, References

MODULES = ("check_build", "check_accept", "check_commit", "check_mask", "check_topk", "check_window")
CHECKS = {
    f"{module[6:]}-{name}": check
    for module in MODULES
    for name, check in importlib.import_module(module).CHECKS.items()
}


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    return Emulated(compile_library(tmp_path_factory.mktemp("emulated")))


@pytest.fixture(
    params=[
        "cpu",
        "reference",
        pytest.param("emulated", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def ops(request):
    if request.param == "emulated":
        return request.getfixturevalue("emulated")
    return References() if request.param == "reference" else Api(request.param)


@pytest.mark.parametrize("name", CHECKS)
def test_check(ops, name):
    CHECKS[name](ops)


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_step.CHECKS)
def test_captured_step(name):
    gpu_step.CHECKS[name](torch.device("cuda", torch.cuda.current_device()))
