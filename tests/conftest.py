"""Shared by all tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
"""How long an example takes says nothing here: the machine may be slow, or busy."""


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Matrices here are tiny: a second thread costs more than it gives, and workers run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
