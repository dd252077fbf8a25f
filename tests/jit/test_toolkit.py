"""Where a compiler is looked for, and what is said when there is none."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import fake_toolkits as fakes
import pytest

from treeverify.errors import BuildError
from treeverify.jit import toolkit
from treeverify.jit.modules import COMMON_TARGETS, TARGETS, module_named, target_for, target_named

ROOT = Path(__file__).resolve().parents[2]


def packages(monkeypatch, place):
    """PyPI's packages are installed in ``place``."""

    class Spec:
        submodule_search_locations = (str(place),)

    monkeypatch.setattr(toolkit, "find_spec", lambda name: Spec)


def test_no_compiler_names_the_toolkits_own_package(nowhere):
    with pytest.raises(
        BuildError, match=r"no CUDA compiler.*pip install 'cuda-toolkit\[nvcc,cccl,cudart\]==13\.0\.\*'"
    ):
        toolkit.find_toolkit()


def test_the_package_that_is_advised_is_the_one_that_the_extra_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["build"] == [toolkit.PACKAGE]


def test_nobody_is_sent_to_this_projects_name_on_an_index():
    """The project holds no name there; whoever took it would be installed."""
    files = [p for part in ("src", "docs", "scripts", "benchmarks", "training") for p in (ROOT / part).rglob("*")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    texts = {
        p: p.read_text()
        for p in files
        if p.suffix in {".py", ".md", ".sh", ".toml", ".html", ".cu", ".cc", ""} and p.is_file()
    }
    install = re.compile(r"(pip3?|uv|uv add|pipx) (install|add|download)[^\n]*[ '\"]treeverify\b(?!/)")
    assert len(texts) > 200
    assert [str(p) for p, text in texts.items() if install.search(text)] == []


def test_cuda_home_is_not_skipped_when_it_is_wrong(nowhere, monkeypatch):
    fakes.cxx(nowhere / "g++")
    fakes.toolkit(nowhere / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "other"))
    with pytest.raises(BuildError, match=r"CUDA_HOME is .*other, which has no bin/nvcc: mend it, or unset it"):
        toolkit.find_toolkit()
    fakes.script(nowhere / "other/bin/nvcc", "echo it is broken; exit 3")
    with pytest.raises(
        BuildError, match=r"it is broken[\s\S]*exit code 3[\s\S]*what helps: mend CUDA_HOME, or unset it"
    ):
        toolkit.find_toolkit()


def test_the_conventional_place_and_the_packages(nowhere, monkeypatch):
    fakes.cxx(nowhere / "g++")
    root = fakes.toolkit(nowhere / "site/nvidia/cu13")
    packages(monkeypatch, nowhere / "site/nvidia")
    found = toolkit.find_toolkit()
    assert found.nvcc == root / "bin/nvcc"
    assert found.library == root / "lib"
    assert found.include == root / "include"
    assert found.version == "13.0.88"
    toolkit.find_toolkit.cache_clear()
    assert fakes.toolkit(nowhere / "cuda", library="lib64") == toolkit.CONVENTIONAL
    found = toolkit.find_toolkit()
    assert (found.nvcc, found.library) == (nowhere / "cuda/bin/nvcc", nowhere / "cuda/lib64")


def test_every_nvcc_on_the_path_is_tried_once_in_order(nowhere, monkeypatch):
    fakes.cxx(nowhere / "g++")
    monkeypatch.setenv(
        "PATH", os.pathsep.join(str(nowhere / place) for place in ("one", "two", "three", ".", "cuda/bin"))
    )
    for place in ("one", "three", "cuda/bin"):
        fakes.script(nowhere / place / "nvcc", "echo $0 is broken; exit 1")
    (nowhere / "two").symlink_to(nowhere / "one")
    with pytest.raises(BuildError) as caught:
        toolkit.find_toolkit()
    broken = [line for line in str(caught.value).splitlines() if line.endswith("is broken")]
    assert broken == [f"{nowhere / place}/nvcc is broken" for place in ("one", "three", "cuda/bin")]
    assert toolkit.PACKAGE in str(caught.value).splitlines()[-1]


@pytest.mark.parametrize(
    "fault", ["fails", "no program", "silent", "no header", "header without its own", "no runtime"]
)
def test_a_broken_toolkit_is_passed_over_and_said(nowhere, monkeypatch, capsys, fault):
    fakes.cxx(nowhere / "g++")
    first = fakes.toolkit(nowhere / "cuda")
    second = fakes.toolkit(nowhere / "site/nvidia/cu13")
    packages(monkeypatch, nowhere / "site/nvidia")
    said = {
        "fails": "nvcc: not for this machine",
        "no program": "Exec format error",
        "silent": "cuda_runtime.h: No such file",
        "no header": "cuda_runtime.h: No such file",
        "header without its own": "host_config.h: No such file",
        "no runtime": f"has no libcudart_static.a in {first}",
    }
    if fault == "fails":
        fakes.script(first / "bin/nvcc", "echo nvcc: not for this machine; exit 1")
    elif fault == "no program":
        (first / "bin/nvcc").write_bytes(b"\x7fELF, but not really")
    elif fault == "silent":
        fakes.script(first / "bin/nvcc", "exit 0")
    elif fault == "no header":
        (first / "include/cuda_runtime.h").unlink()
    elif fault == "header without its own":
        (first / "include/cuda_runtime.h").write_text('#include "crt/host_config.h"\n')
    else:
        (first / "lib/libcudart_static.a").unlink()
    assert toolkit.find_toolkit().nvcc == second / "bin/nvcc"
    text = capsys.readouterr().err
    assert text.startswith(f"treeverify: passed over: {first}/bin/nvcc")
    assert said[fault] in text


def test_a_toolkit_that_does_not_know_the_target_is_passed_over_for_it(nowhere, monkeypatch, capsys, real_root):
    fakes.cxx(nowhere / "g++")
    real = real_root / "bin/nvcc"
    refuse = 'case "$*" in *sm_120*) echo nvcc fatal: Unsupported gpu architecture; exit 1;; esac'
    old = fakes.script(nowhere / "nvcc", f'{refuse}\nexec {real} "$@"')
    monkeypatch.setattr(toolkit, "CONVENTIONAL", real_root)
    assert toolkit.find_toolkit(TARGETS["90a"]).nvcc == old
    assert toolkit.find_toolkit().nvcc == old
    assert capsys.readouterr().err == ""
    assert toolkit.find_toolkit(TARGETS["120"]).nvcc == real
    assert "Unsupported gpu architecture" in capsys.readouterr().err


def test_no_cxx_and_no_runtime_are_named(nowhere):
    root = fakes.toolkit(nowhere / "cuda")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler 'g\+\+' was found"):
        toolkit.find_toolkit()
    fakes.cxx(nowhere / "g++")
    (root / "lib/libcudart_static.a").unlink()
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
