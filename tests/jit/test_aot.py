"""Every library compiles for the common targets on a machine without a GPU, within every limit."""

from __future__ import annotations

import pytest

from treeverify.jit import aot, compiler
from treeverify.jit.modules import COMMON_TARGETS, KIB, MODULES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_a_number_of_jobs_that_is_none_is_refused(jobs, capsys):
    with pytest.raises(SystemExit):
        aot.main(["--jobs", jobs])
    assert "--jobs" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("setting", ["MAX_JOBS", "TREEVERIFY_CACHE"])
def test_a_wrong_setting_is_one_line(monkeypatch, capsys, setting, fresh_toolkit):
    monkeypatch.setenv(setting, "$x")
    assert aot.main(["--targets", "90a", "--modules", "tree_ops"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"treeverify: {setting}: expected")


@pytest.fixture(scope="module")
def built():
    return aot.build_all(COMMON_TARGETS)


def test_everything_compiles_without_spills_within_the_targets_limits(built):
    assert len(built) == len(COMMON_TARGETS) * len(MODULES)
    assert [breach for one in built for breach in one.breaches] == []


def test_f1_the_small_configuration_fits_99_kib_everywhere(built):
    for one in built:
        if one.module.name.endswith("99k") or one.target.name == "120":
            assert max(one.dynamic_shared, *(kernel.static_shared for kernel in one.kernels)) <= 99 * KIB


def test_ship_names_libraries_as_the_loader_looks_for_them(built, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "shipped")
    copies = aot.ship(built, tmp_path / "shipped")
    assert all(compiler.prebuilt(one.module, one.target).is_file() for one in built)
    assert len(copies) == len(built)


def test_f1_workspace_stays_within_256_mib(built):
    attention = [one for one in built if one.module.name.startswith("tree_attention.")]
    assert len(attention) >= 3
    for one in attention:
        size = compiler.open_library(one.path).function("workspace_bytes")
        assert size(64, 65, 16, 132, 0, 262_144) <= 256 * KIB * KIB
