"""Environment variables: every value is parsed, nothing else than the documented ones is accepted."""

from __future__ import annotations

import os
import pwd

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


FOLDERS = {"TREEVERIFY_CACHE": env.cache_dir, "CUDA_HOME": env.cuda_home, "KDTREE_DUMP_DIR": env.dump_dir}


@pytest.mark.parametrize(("name", "read"), FOLDERS.items())
def test_a_folder_may_begin_with_a_tilde_or_be_relative(monkeypatch, tmp_path, name, read):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for text, path in (("~/x", "home/x"), ("~", "home"), ("x/y", "x/y"), ("a ~b", "a ~b")):
        monkeypatch.setenv(name, text)
        assert read() == tmp_path / path


@pytest.mark.parametrize("text", ["$HOME/x", "${HOME}/x", "/a$b", "/a`b`", '"/a"', "~nobody-of-this-name/x"])
@pytest.mark.parametrize(("name", "read"), FOLDERS.items())
def test_a_folder_that_nobody_has_expanded_is_refused_in_one_line(monkeypatch, name, read, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=rf"^{name}: expected a path .*, got .+$") as caught:
        read()
    assert "\n" not in str(caught.value)


def test_the_default_caches_folders_follow_the_same_rules(monkeypatch, tmp_path):
    monkeypatch.delenv("TREEVERIFY_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/x")
    assert env.cache_dir() == tmp_path / "x/treeverify"
    monkeypatch.setenv("XDG_CACHE_HOME", "$HOME/x")
    with pytest.raises(ConfigError, match=r"^XDG_CACHE_HOME: expected a path without"):
        env.cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert env.cache_dir() == tmp_path / ".cache/treeverify"


@pytest.mark.parametrize("home", [None, "/home/a$b"])
def test_without_a_home_the_cache_is_named(monkeypatch, home):
    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("TREEVERIFY_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(ConfigError, match=r"^TREEVERIFY_CACHE: expected a folder") as caught:
        env.cache_dir()
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("TREEVERIFY_CACHE", "/somewhere")
    assert str(env.cache_dir()) == "/somewhere"


def test_build_jobs(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 6, 7})
    for text, jobs in (("1", 1), ("12", 12), ("", 3)):
        monkeypatch.setenv("MAX_JOBS", text)
        assert env.build_jobs() == jobs
    for bad in ("0", "-1", "all", "1.5", " 2"):
        monkeypatch.setenv("MAX_JOBS", bad)
        with pytest.raises(ConfigError, match="MAX_JOBS: expected an integer >= 1"):
            env.build_jobs()
    monkeypatch.delenv("MAX_JOBS")
    assert env.build_jobs() == 3


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
