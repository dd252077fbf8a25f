"""The compiled implementations on a GPU: the table of cases against float64, and every fault seen in the field."""

from __future__ import annotations

import gpu_faults
import gpu_points
import pytest
from gpu_kernel import Kernel, exact_on_device

pytestmark = pytest.mark.gpu
IMPLEMENTATIONS = ("naive", "portable", "portable-99k")


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def kernel(request):
    return Kernel(request.param)


@pytest.mark.parametrize("name", gpu_faults.GRID)
def test_grid(kernel, name):
    case = gpu_faults.grid_case(name, kernel.device)
    kernel.matches(case, exact_on_device(case))


@pytest.mark.parametrize("name", gpu_faults.CHECKS)
def test_fault(kernel, name):
    gpu_faults.CHECKS[name](kernel)


@pytest.mark.parametrize("name", gpu_points.CHECKS)
def test_point(kernel, name):
    gpu_points.CHECKS[name](kernel)
