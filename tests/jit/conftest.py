from __future__ import annotations

import pytest
import trivial

from treeverify.jit import toolkit, units
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


@pytest.fixture(scope="session")
def real_toolkit():
    """The toolkit that this machine has."""
    return find_toolkit()


@pytest.fixture(scope="session")
def real_root(real_toolkit):
    """Its folder, with bin/nvcc."""
    root = real_toolkit.include.parent
    if not (root / "bin/nvcc").is_file():
        pytest.skip(f"the toolkit in {root} is laid out in another way")
    return root


@pytest.fixture
def nowhere(monkeypatch, tmp_path, fresh_toolkit):
    """No toolkit in any of the usual places, and a cache of its own."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TREEVERIFY_CACHE", str(tmp_path / "cache"))
    for name in ("CUDA_HOME", "CXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit, "CONVENTIONAL", tmp_path / "cuda")
    monkeypatch.setattr(toolkit, "find_spec", lambda name: None)
    return tmp_path
