"""The real nvcc in the layouts in which toolkits come, and what a C++ compiler and a path may be."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import fake_toolkits as fakes
import pytest

from treeverify.errors import BuildError
from treeverify.jit import compiler, units
from treeverify.jit.modules import TARGETS, Module
from treeverify.jit.toolkit import find_toolkit

TARGET = TARGETS["90a"]
BOTH = Module("both", ("ops/device.cu",), ("ops/host.cc",), dynamic_kernel=None)


@pytest.fixture
def both(nowhere, monkeypatch):
    """Sources of a library with a kernel, whose host part includes CUDA's and the C library's headers."""
    folder = nowhere / "csrc/ops"
    folder.mkdir(parents=True)
    (folder / "device.cu").write_text("__global__ void device(int* out) { *out = 1; }\n")
    (folder / "host.cc").write_text(
        "#include <cuda_runtime.h>\n#include <cstdlib>\nint host() { return cudaGetLastError(); }\n"
    )
    monkeypatch.setattr(units, "CSRC", nowhere / "csrc")
    monkeypatch.setenv("PATH", fakes.SYSTEM)
    return nowhere


def nvcc_in(folder, real_root):
    """nvcc finds its place by its own file, so that is copied; the rest is linked."""
    folder.mkdir(parents=True)
    for path in (real_root / "bin").iterdir():
        if path.name not in ("nvcc", "nvcc.profile"):
            (folder / path.name).symlink_to(path)
    for name in ("nvcc", "nvcc.profile"):
        shutil.copy(real_root / "bin" / name, folder / name)
    (folder.parent / "nvvm").symlink_to(real_root / "nvvm")


def conda(root, real_root, monkeypatch):
    nvcc_in(root / "bin", real_root)
    (root / "include").mkdir()
    (root / "lib").mkdir()
    folder = root / f"targets/{os.uname().machine}-linux"
    return root / "bin", folder / "include", folder / "lib"


def pypi(root, real_root, monkeypatch):
    nvcc_in(root / "bin", real_root)
    return root / "bin", root / "include", root / "lib"


def distribution(root, real_root, monkeypatch, named=True):
    inner, include, library = root / "usr/lib/toolkit", root / "usr/include", root / "usr/lib/cpu-linux-gnu"
    nvcc_in(inner / "bin", real_root)
    profile = [f"CICC_PATH = {inner}/nvvm/bin", f"NVVMIR_LIBRARY_DIR = {inner}/nvvm/libdevice"]
    profile += ["PATH += $(CICC_PATH):$(_HERE_):"]
    if named:
        profile += [f'INCLUDES += "-I{include}" $(_SPACE_)', f"LIBRARIES =+ $(_SPACE_) -L{library}/stubs -L{library}"]
    (inner / "bin/nvcc.profile").write_text("\n".join(profile) + "\n")
    fakes.script(root / "usr/bin/nvcc", f'exec {inner}/bin/nvcc "$@"')
    return root / "usr/bin", include, library


def distribution_that_names_nothing(root, real_root, monkeypatch):
    programs, include, library = distribution(root, real_root, monkeypatch, named=False)
    monkeypatch.setenv("CPATH", str(include))  # they stand for /usr/include and /usr/lib/TRIPLET
    monkeypatch.setenv("LIBRARY_PATH", str(library))
    return programs, include, library


@pytest.mark.parametrize("layout", [conda, pypi, distribution, distribution_that_names_nothing])
def test_a_toolkit_works_in_the_layout_in_which_nvcc_alone_works(both, real_root, real_toolkit, monkeypatch, layout):
    programs, include, library = layout(both / "root", real_root, monkeypatch)
    shutil.copytree(real_root / "include", include)
    library.mkdir(parents=True, exist_ok=True)
    shutil.copy(real_toolkit.library / "libcudart_static.a", library)
    monkeypatch.setenv("PATH", f"{programs}:{fakes.SYSTEM}")
    found = find_toolkit(TARGET)
    assert (found.nvcc, found.include, found.library) == (programs / "nvcc", include, library)
    assert compiler.build(BOTH, TARGET).is_file()


def test_a_link_to_nvcc_stands_for_the_toolkit_of_its_file(both, real_root, monkeypatch):
    (both / "bin").mkdir()
    (both / "bin/nvcc").symlink_to(real_root / "bin/nvcc")
    monkeypatch.setenv("PATH", f"{both / 'bin'}:{fakes.SYSTEM}")
    assert find_toolkit(TARGET).nvcc == (real_root / "bin/nvcc").resolve()


@pytest.fixture
def real(both, monkeypatch, real_root):
    """This machine's toolkit, found afresh, in a cache of its own."""
    monkeypatch.setenv("CUDA_HOME", str(real_root))
    return both


def test_words_of_cxx_are_kept_for_both_compilers(real, monkeypatch):
    log = real / "log"
    fakes.script(real / "bin/launcher", f'echo "$@" >> {log}\nexec "$@"')
    monkeypatch.setenv("PATH", f"{real / 'bin'}:{fakes.SYSTEM}")
    monkeypatch.setenv("CXX", "launcher g++ '-DWORDS=1 + 1'")
    compiler.build(BOTH, TARGET)
    lines = log.read_text().splitlines()
    assert all(line.startswith("g++ -DWORDS=1 + 1 ") for line in lines)
    for part in ("ops/host.cc -o", "trial.cudafe1.cpp", "device.cudafe1.cpp", "library.so"):
        assert any(part in line for line in lines), part


def test_other_words_are_another_key(real, monkeypatch):
    monkeypatch.setenv("CXX", "g++ -DWORDS=1")
    first = find_toolkit()
    monkeypatch.setenv("CXX", "g++ -DWORDS=2")
    find_toolkit.cache_clear()
    second = find_toolkit()
    assert first.cxx != second.cxx
    for unit in units.units_of(BOTH, TARGET):
        assert unit.build_key(first) != unit.build_key(second)


def test_a_compiler_whose_path_has_a_space_is_one_word(real, monkeypatch):
    monkeypatch.setenv("CXX", str(fakes.cxx(real / "my tools/g++")))
    assert find_toolkit(TARGET).cxx == real / "my tools/g++"


@pytest.mark.parametrize(
    ("text", "said"),
    [("gone g++", "no C.. compiler 'gone'"), ("env gone-g++", "gone-g.*No such file"),
     ("g++ 'x", "CXX: expected a command.*No closing quotation"), ("  ", "CXX: expected a command")],
)  # fmt: skip
def test_a_cxx_that_is_no_compiler_says_why(real, monkeypatch, text, said):
    monkeypatch.setenv("CXX", text)
    with pytest.raises(BuildError, match=said):
        find_toolkit()


def test_nvccs_own_reason_is_shown(real, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-ccbin=/gone")
    with pytest.raises(BuildError, match=r"gone: No such file[\s\S]*nvcc fatal"):
        find_toolkit()


def test_our_compiler_wins_over_one_in_nvccs_flags_and_the_flags_are_in_the_key(real, monkeypatch):
    plain = find_toolkit()
    find_toolkit.cache_clear()
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin=/gone -lineinfo")
    flagged = find_toolkit(TARGET)
    device, host = units.units_of(BOTH, TARGET)
    assert device.build_key(flagged) != device.build_key(plain)
    assert host.build_key(flagged) == host.build_key(plain)


def test_a_cache_whose_path_has_odd_characters_works(real, monkeypatch):
    monkeypatch.setenv("TREEVERIFY_CACHE", str(real / "a b'c;d&e(f)*#!%ü"))
    assert compiler.build(BOTH, TARGET).is_relative_to(real / "a b'c;d&e(f)*#!%ü")


@pytest.mark.parametrize("folder", ["a$b", "a`b", 'a"b'])
def test_a_path_that_nvcc_would_garble_is_one_line(real, monkeypatch, folder):
    (real / folder).mkdir()
    shutil.copytree(real / "csrc", real / folder / "csrc")
    monkeypatch.setattr(units, "CSRC", real / folder / "csrc")
    with pytest.raises(BuildError, match=r"nvcc cannot read the argument .*its shell would expand") as caught:
        compiler.build(BOTH, TARGET)
    assert "\n" not in str(caught.value)


def test_a_scratch_folder_that_nvcc_would_garble_is_named(real, monkeypatch):
    (real / "a$b").mkdir()
    monkeypatch.setenv("TMPDIR", str(real / "a$b"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # asked anew
    with pytest.raises(BuildError, match=r"nvcc cannot read TMPDIR .*a\$b: its shell would expand"):
        compiler.build(BOTH, TARGET)


def test_headers_in_the_systems_own_folder_do_not_hide_the_c_librarys(real):
    toolkit = replace(find_toolkit(), include=Path("/usr/include"))
    (real / "csrc/ops/host.cc").write_text("#include <cstdlib>\nint host() { return std::abs(-1); }\n")
    assert compiler.compile_unit(units.units_of(BOTH, TARGET)[1], toolkit).is_file()
