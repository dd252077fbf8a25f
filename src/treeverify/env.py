"""The only reader of the process environment: name, type, default and meaning of each variable."""

from __future__ import annotations

import os
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from treeverify.errors import ConfigError


class VerifyMode(StrEnum):
    """Which verify attention is served (``KDTREE_VERIFY``)."""

    OFF = "off"  # the baseline
    VALIDATE = "validate"  # both run, the baseline is served, differences are recorded
    ON = "on"  # ours


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


def untested_sglang() -> bool:
    """``KDTREE_UNTESTED_SGLANG``: unset, SGLang releases that were not tested are refused; ``allow``, they are served.

    Names and signatures are checked all the same. Raises ConfigError for anything else.
    """
    text = os.environ.get("KDTREE_UNTESTED_SGLANG")
    if text not in (None, "allow"):
        raise ConfigError(f"KDTREE_UNTESTED_SGLANG: expected allow, or to be unset; got {text!r}")
    return text is not None


def budget_by_cost() -> bool:
    """``KDTREE_BUDGET``: unset, the width of DDTREE's trees is fixed; ``auto``, it follows measured costs.

    Raises ConfigError for anything else.
    """
    text = os.environ.get("KDTREE_BUDGET")
    if text not in (None, "auto"):
        raise ConfigError(f"KDTREE_BUDGET: expected auto, or to be unset; got {text!r}")
    return text is not None


def width_ladder() -> tuple[int, ...] | None:
    """``KDTREE_LADDER``: comma list of the widths that ``KDTREE_BUDGET=auto`` chooses from; unset: a default ladder.

    Raises ConfigError unless they are rising integers that begin with 1 (no speculation), and where there is no
    ``KDTREE_BUDGET=auto`` to choose.
    """
    text = os.environ.get("KDTREE_LADDER")
    if text is None:
        return None
    if not budget_by_cost():
        raise ConfigError(f"KDTREE_LADDER: expected to be unset without KDTREE_BUDGET=auto; got {text!r}")
    parts = text.split(",")
    numbers = [int(part) for part in parts if part.isascii() and part.isdecimal()]
    if len(numbers) != len(parts) or numbers[0] != 1 or any(a >= b for a, b in pairwise(numbers)):
        raise ConfigError(f"KDTREE_LADDER: expected rising integers that begin with 1, such as 1,9,33; got {text!r}")
    return tuple(numbers)


def planted_fault() -> str | None:
    """``TREEVERIFY_FAULT``: a fault that ``treeverify serve`` plants into our kernel, to test that a cutover stops it.

    The value is checked by ``serve.faults``; everything else that runs our kernel calls ``refuse_fault``.
    """
    return os.environ.get("TREEVERIFY_FAULT")


def refuse_fault(where: str) -> None:
    """Raise ConfigError if ``TREEVERIFY_FAULT`` is set: only ``treeverify serve`` plants one."""
    if planted_fault() is not None:
        raise ConfigError(f"TREEVERIFY_FAULT: expected to be unset in {where}; only treeverify serve plants faults")


def cache_dir() -> Path:
    """``TREEVERIFY_CACHE``: compiled kernels, measured costs, the packaged model unpacked.

    Default: ``treeverify`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. Raises ConfigError for a path as ``_folder`` does,
    and where neither is set and this user has no home folder.
    """
    named = _folder("TREEVERIFY_CACHE")
    if named is not None:
        return named
    base = _folder("XDG_CACHE_HOME")
    if base is not None:
        return base / "treeverify"
    try:
        return _path("the default", "~/.cache/treeverify")
    except ConfigError as error:
        raise ConfigError(f"TREEVERIFY_CACHE: expected a folder, got nothing; {error}") from None


def cuda_home() -> Path | None:
    """``CUDA_HOME``: the CUDA toolkit to compile with, alone; default: those on PATH, /usr/local/cuda, then PyPI's.

    Raises ConfigError for a path as ``_folder`` does.
    """
    return _folder("CUDA_HOME")


def cxx() -> str | None:
    """``CXX``: the C++ compiler for bindings, also handed to nvcc; options and a launcher may stand with it.

    Default: ``g++``.
    """
    return os.environ.get("CXX") or None


def search_path() -> list[str]:
    """``PATH``: the folders in which nvcc is looked for, in order."""
    return os.get_exec_path()


def build_jobs() -> int:
    """``MAX_JOBS``: compilers at a time; default: one for each core that this process may use.

    Raises ConfigError unless an integer >= 1; set to nothing is unset.
    """
    return _count("MAX_JOBS", 1) if os.environ.get("MAX_JOBS") else len(os.sched_getaffinity(0))


def cpu_threads() -> int:
    """``TREEVERIFY_THREADS``: CPU threads of the commands, default 1. Raises ConfigError unless an integer >= 1.

    The packaged model's matrices are so small that a second thread gains little, and where another process runs,
    threads that wait for each other lose far more than that.
    """
    return _count("TREEVERIFY_THREADS", 1)


def dump_dir() -> Path | None:
    """``KDTREE_DUMP_DIR``: where verify calls beyond the bound are dumped, with user data; default: nowhere.

    Raises ConfigError if it is set to nothing, and for a path as ``_folder`` does.
    """
    if os.environ.get("KDTREE_DUMP_DIR") == "":
        raise ConfigError("KDTREE_DUMP_DIR: expected a folder, got nothing; unset it for no dumps")
    return _folder("KDTREE_DUMP_DIR")


def dump_max() -> int:
    """``KDTREE_DUMP_MAX``: dump files per rank in ``KDTREE_DUMP_DIR``, default 8. Raises ConfigError unless >= 1."""
    return _count("KDTREE_DUMP_MAX", 8)


def api_key() -> str | None:
    """``TREEVERIFY_API_KEY``: sent to a server as ``Authorization: Bearer KEY``; default: none."""
    return os.environ.get("TREEVERIFY_API_KEY") or None


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ConfigError(f"{name}: expected an integer >= 1, got {text!r}")
    return int(text)


def _folder(name: str) -> Path | None:
    """Return the absolute path that a variable names, ``~`` put in full; None if it is unset or set to nothing."""
    text = os.environ.get(name)
    return _path(name, text) if text else None


def _path(name: str, text: str) -> Path:
    """Raises ConfigError for a path with a variable in it, which nobody has expanded, and for an unknown home.

    A back-quote and a quotation mark are refused with the dollar sign: nvcc hands its paths to a shell.
    """
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError:  # no HOME, or no such user
        raise ConfigError(f"{name}: expected a path whose home folder is known, got {text!r}") from None
    if any(character in str(path) for character in '$`"'):
        raise ConfigError(f'{name}: expected a path without $, ` and ", got {str(path)!r}')
    return path
