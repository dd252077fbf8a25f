"""The only reader of the process environment: name, type, default and meaning of each variable."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

from treeverify.errors import ConfigError


class VerifyMode(StrEnum):
    """Which verify attention is served (``KDTREE_VERIFY``)."""

    OFF = "off"  # the baseline
    VALIDATE = "validate"  # both run, the baseline is served, differences are recorded
    ON = "on"  # ours

    @property
    def code(self) -> int:
        """The mode where only a number can be sent: 0 off, 1 validate, 2 on."""
        return list(VerifyMode).index(self)


def parse_verify_mode(text: str, variable: str = "KDTREE_VERIFY") -> VerifyMode:
    """Return the mode named ``text``; raises ConfigError that names ``variable`` and lists the three otherwise."""
    try:
        return VerifyMode(text)
    except ValueError:
        allowed = ", ".join(mode.value for mode in VerifyMode)
        raise ConfigError(f"{variable}: expected one of {allowed}; got {text!r}") from None


def verify_mode() -> VerifyMode:
    """``KDTREE_VERIFY``: off (default when unset) | validate | on. Raises ConfigError for anything else."""
    text = os.environ.get("KDTREE_VERIFY")
    return VerifyMode.OFF if text is None else parse_verify_mode(text)


def allowed_modes() -> tuple[VerifyMode, ...]:
    """``KDTREE_VERIFY_ALLOW``: comma list of the modes that a live switch may choose; unset: the starting mode only.

    In the order off, validate, on. Raises ConfigError for another name, a repeated one, and a list without the mode
    of ``KDTREE_VERIFY``.
    """
    start, text = verify_mode(), os.environ.get("KDTREE_VERIFY_ALLOW")
    if text is None:
        return (start,)
    named = [parse_verify_mode(part, "KDTREE_VERIFY_ALLOW") for part in text.split(",")]
    if len(set(named)) != len(named) or start not in named:
        expected = f"each mode once, with the starting mode {start.value} among them"
        raise ConfigError(f"KDTREE_VERIFY_ALLOW: expected {expected}; got {text!r}")
    return tuple(mode for mode in VerifyMode if mode in named)


def cache_dir() -> Path:
    """``TREEVERIFY_CACHE``: compiled kernels; default ``treeverify`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    explicit = os.environ.get("TREEVERIFY_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "treeverify"


def cuda_home() -> Path | None:
    """``CUDA_HOME``: the CUDA toolkit to compile with; default: nvcc on PATH, then the extra ``build``'s packages."""
    text = os.environ.get("CUDA_HOME")
    return Path(text) if text else None


def cxx() -> str | None:
    """``CXX``: the C++ compiler for bindings, also handed to nvcc; default ``g++``."""
    return os.environ.get("CXX") or None


def cpu_threads() -> int:
    """``TREEVERIFY_THREADS``: CPU threads of the commands, default 1. Raises ConfigError unless an integer >= 1.

    The packaged model's matrices are so small that a second thread gains little, and where another process runs,
    threads that wait for each other lose far more than that.
    """
    text = os.environ.get("TREEVERIFY_THREADS", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"TREEVERIFY_THREADS: expected an integer >= 1, got {text!r}")
    return int(text)
