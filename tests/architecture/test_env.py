"""Environment variables: every value is parsed, nothing else than the documented ones is accepted."""

from __future__ import annotations

import pytest

from treeverify import env
from treeverify.errors import ConfigError


def test_verify_mode_defaults_to_off_and_lists_the_three(monkeypatch):
    monkeypatch.delenv("KDTREE_VERIFY", raising=False)
    assert env.verify_mode() is env.VerifyMode.OFF
    for mode in env.VerifyMode:
        monkeypatch.setenv("KDTREE_VERIFY", mode.value)
        assert env.verify_mode() is mode
    for bad in ("", "ON", "1", " on"):
        monkeypatch.setenv("KDTREE_VERIFY", bad)
        with pytest.raises(ConfigError, match="off, validate, on"):
            env.verify_mode()


def test_allowed_modes_default_to_the_starting_one(monkeypatch):
    monkeypatch.delenv("KDTREE_VERIFY_ALLOW", raising=False)
    monkeypatch.delenv("KDTREE_VERIFY", raising=False)
    assert env.allowed_modes() == (env.VerifyMode.OFF,)
    monkeypatch.setenv("KDTREE_VERIFY", "on")
    assert env.allowed_modes() == (env.VerifyMode.ON,)
    monkeypatch.setenv("KDTREE_VERIFY_ALLOW", "on,off")
    assert env.allowed_modes() == (env.VerifyMode.OFF, env.VerifyMode.ON)


@pytest.mark.parametrize("bad", ["", "off", "on,yes", "on,", "on, off", "on,on"])
def test_allowed_modes_refuse_other_names_repeats_and_lists_without_the_start(monkeypatch, bad):
    monkeypatch.setenv("KDTREE_VERIFY", "on")
    monkeypatch.setenv("KDTREE_VERIFY_ALLOW", bad)
    with pytest.raises(ConfigError, match="KDTREE_VERIFY_ALLOW: expected"):
        env.allowed_modes()


def test_cpu_threads(monkeypatch):
    monkeypatch.delenv("TREEVERIFY_THREADS", raising=False)
    assert env.cpu_threads() == 1
    monkeypatch.setenv("TREEVERIFY_THREADS", "3")
    assert env.cpu_threads() == 3
    for bad in ("0", "-1", "two", "1.5", ""):
        monkeypatch.setenv("TREEVERIFY_THREADS", bad)
        with pytest.raises(ConfigError, match="TREEVERIFY_THREADS"):
            env.cpu_threads()


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("TREEVERIFY_CACHE", str(tmp_path / "a"))
    assert env.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("TREEVERIFY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "treeverify"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.cache_dir().parts[-2:] == (".cache", "treeverify")


def test_dumps_are_off_unless_a_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("KDTREE_DUMP_DIR", raising=False)
    assert env.dump_dir() is None
    monkeypatch.setenv("KDTREE_DUMP_DIR", str(tmp_path))
    assert env.dump_dir() == tmp_path
    monkeypatch.setenv("KDTREE_DUMP_DIR", "")
    with pytest.raises(ConfigError, match="KDTREE_DUMP_DIR"):
        env.dump_dir()


def test_dump_max(monkeypatch):
    monkeypatch.delenv("KDTREE_DUMP_MAX", raising=False)
    assert env.dump_max() == 8
    monkeypatch.setenv("KDTREE_DUMP_MAX", "2")
    assert env.dump_max() == 2
    for bad in ("0", "-1", "many", "", "\u0663", "1e3"):
        monkeypatch.setenv("KDTREE_DUMP_MAX", bad)
        with pytest.raises(ConfigError, match="KDTREE_DUMP_MAX"):
            env.dump_max()


def test_api_key(monkeypatch):
    monkeypatch.delenv("TREEVERIFY_API_KEY", raising=False)
    assert env.api_key() is None
    monkeypatch.setenv("TREEVERIFY_API_KEY", "secret")
    assert env.api_key() == "secret"
