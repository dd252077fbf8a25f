"""Which releases of SGLang are served. No SGLang needed: its version is what its metadata say."""

from __future__ import annotations

from importlib import metadata

import pytest

from treeverify.errors import ConfigError
from treeverify.integrations.sglang import compat, names
from treeverify.integrations.sglang.ddtree import compat as ddtree

SWITCH = "KDTREE_UNTESTED_SGLANG"
TESTED = [
    "0.5.17",
    "0.5.18",
    "0.5.23",
    "0.5.18+cu129",
    "0.5.23+cu130.torch2.13",
    "0.5.20rc0",
    "0.5.17rc1",
    "v0.5.19",
    "0.5.23.post2",
    "0.5.20.dev123+g1a2b3c4",
    "0.5.21a1.dev4",
]
OTHERS = ["0.5.16", "0.5.16+cu129", "0.5.16.post3", "0.5.24", "0.5.24rc0", "0.5.100", "0.6", "0.5", "1.0.0", "1!0.5.18"]
OTHERS += ["0.0.0.dev1+g1a2b3c4", "main", ""]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without the switch."""
    monkeypatch.delenv(SWITCH, raising=False)
    return monkeypatch


def as_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)


@pytest.mark.parametrize("version", TESTED)
def test_a_release_that_was_tested_is_served_in_every_build(installed: pytest.MonkeyPatch, version: str) -> None:
    as_version(installed, version)
    compat.check_version()


@pytest.mark.parametrize("version", OTHERS)
def test_any_other_is_refused_and_the_switch_is_named(installed: pytest.MonkeyPatch, version: str) -> None:
    as_version(installed, version)
    with pytest.raises(ConfigError) as error:
        compat.check_version()
    said = str(error.value)
    assert f"sglang.version: expected 0.5.17 to 0.5.23, found {version}; {SWITCH}=allow serves it if all names" in said


@pytest.mark.parametrize("version", [*OTHERS, "unknown"])
def test_the_switch_serves_any_and_says_so(
    installed: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    as_version(installed, version)
    installed.setenv(SWITCH, "allow")
    compat.check_version()
    assert f"SGLang {version} was not tested, 0.5.17 to 0.5.23 were; served by {SWITCH}" in caplog.text


@pytest.mark.parametrize("version", ["0.5.18", "0.6"])
@pytest.mark.parametrize("value", ["", "1", "yes", "Allow"])
def test_the_switch_has_one_value(installed: pytest.MonkeyPatch, version: str, value: str) -> None:
    as_version(installed, version)
    installed.setenv(SWITCH, value)
    with pytest.raises(ConfigError, match=f"{SWITCH}: expected allow, or to be unset; got {value!r}"):
        compat.check_version()


def test_no_sglang_at_all(installed: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise metadata.PackageNotFoundError

    installed.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError, match="found unknown"):
        compat.check_version()


@pytest.mark.parametrize(
    ("module", "check"), [(compat, compat.check_registration), (compat, compat.check), (ddtree, ddtree.check)]
)
def test_every_check_looks_at_version_and_signatures(installed: pytest.MonkeyPatch, module, check) -> None:  # type: ignore[no-untyped-def]
    """The switch waives the version alone: a signature that is not as expected is refused with it."""
    as_version(installed, "0.6.1")

    def signature(path: str, _: str) -> None:
        raise names.mismatch(path, "parameters", "others")

    installed.setattr(module, "check_parameters", signature)
    with pytest.raises(ConfigError, match=r"sglang\.version"):
        check()
    installed.setenv(SWITCH, "allow")
    with pytest.raises(ConfigError, match="expected parameters, found others"):
        check()
