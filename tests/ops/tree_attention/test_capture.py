"""Captured graphs on a GPU: padding, changed lengths, no allocation, no sync, and random replays under poison.

``TREEVERIFY_TEST_REPLAYS`` sets the number of random replays (200 unless given; 10,000 before a release).
"""

from __future__ import annotations

import os

import gpu_graphs
import pytest
from gpu_kernel import Kernel

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=("naive", "portable", "portable-99k"))
def kernel(request):
    return Kernel(request.param)


@pytest.mark.parametrize("name", gpu_graphs.CHECKS)
def test_graph(kernel, name):
    gpu_graphs.CHECKS[name](kernel)


def test_random_replays(kernel):
    gpu_graphs.random_replays(kernel, int(os.environ.get("TREEVERIFY_TEST_REPLAYS", "200")))
