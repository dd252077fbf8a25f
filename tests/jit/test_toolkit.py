"""Where a compiler is looked for, and what is said when there is none."""

from __future__ import annotations

import pytest

from treeverify.errors import BuildError
from treeverify.jit import toolkit
from treeverify.jit.modules import COMMON_TARGETS, TARGETS, module_named, target_for, target_named


@pytest.fixture
def nowhere(monkeypatch, tmp_path, fresh_toolkit):
    """No toolkit in any of the usual places."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolkit, "CONVENTIONAL", tmp_path / "cuda")
    monkeypatch.setattr(toolkit, "find_spec", lambda name: None)
    return tmp_path


def fake(root, version="Cuda compilation tools, release 13.0, V13.0.88", library="lib64"):
    for folder in ("bin", "include", library):
        (root / folder).mkdir(parents=True)
    (root / "bin/nvcc").write_text(f"#!/bin/sh\necho '{version}'\n")
    (root / "bin/nvcc").chmod(0o755)
    (root / library / "libcudart_static.a").write_text("")
    return root


def fake_cxx(folder):
    (folder / "g++").write_text("#!/bin/sh\necho g++ 1.0\n")
    (folder / "g++").chmod(0o755)


def test_no_compiler_says_what_to_install(nowhere):
    with pytest.raises(BuildError, match=r"no CUDA compiler.*pip install treeverify\[build\]"):
        toolkit.find_toolkit()


def test_cuda_home_is_not_skipped_when_it_is_wrong(nowhere, monkeypatch):
    fake(nowhere / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "other"))
    with pytest.raises(BuildError, match=r"CUDA_HOME is .*other, which has no bin/nvcc"):
        toolkit.find_toolkit()


def test_the_conventional_place_and_the_packages(nowhere, monkeypatch):
    fake_cxx(nowhere)
    packages = fake(nowhere / "site/nvidia/cu13", library="lib")

    class Spec:
        submodule_search_locations = (str(nowhere / "site/nvidia"),)

    monkeypatch.setattr(toolkit, "find_spec", lambda name: Spec)
    found = toolkit.find_toolkit()
    assert found.nvcc == packages / "bin/nvcc"
    assert found.library == packages / "lib"
    assert (found.version, found.cxx_version) == ("13.0.88", "g++ 1.0")
    toolkit.find_toolkit.cache_clear()
    assert fake(nowhere / "cuda") == toolkit.CONVENTIONAL
    assert toolkit.find_toolkit().nvcc == nowhere / "cuda/bin/nvcc"


def test_no_cxx_and_no_runtime_are_named(nowhere):
    root = fake(nowhere / "cuda")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler 'g\+\+' was found"):
        toolkit.find_toolkit()
    (root / "lib64/libcudart_static.a").unlink()
    with pytest.raises(BuildError, match="no libcudart_static"):
        toolkit.find_toolkit()


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "80"), ((8, 6), "86"), ((8, 7), "86"), ((8, 9), "89"), ((9, 0), "90a"), ((10, 0), "100"),
     ((10, 3), "100"), ((12, 0), "120"), ((12, 1), "121")],
)  # fmt: skip
def test_target_of_a_device(capability, name):
    assert target_for(capability).name == name


@pytest.mark.parametrize("capability", [(7, 5), (9, 1), (11, 0)])
def test_a_device_without_kernels_is_refused(capability):
    with pytest.raises(BuildError, match="no kernel for compute capability"):
        target_for(capability)


def test_names():
    assert set(COMMON_TARGETS) <= set(TARGETS)
    for name in ("70", "90"):
        with pytest.raises(BuildError, match="no target"):
            target_named(name)
    with pytest.raises(BuildError, match="no compiled module"):
        module_named("tree_attention.fast")
