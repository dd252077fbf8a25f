from __future__ import annotations

import pytest
import trivial

from treeverify.jit import units
from treeverify.jit.toolkit import find_toolkit


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    """A csrc folder with one small host library, and a cache of its own."""
    monkeypatch.setenv("TREEVERIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(units, "CSRC", trivial.write(tmp_path / "csrc"))
    return tmp_path / "csrc"


@pytest.fixture
def fresh_toolkit():
    """Forget the toolkit that was found, before and after."""
    find_toolkit.cache_clear()
    yield
    find_toolkit.cache_clear()
