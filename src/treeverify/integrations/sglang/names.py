"""Look up names in an installed package and refuse, with name, expected and found, what is not as expected."""

from __future__ import annotations

import inspect
import re
from importlib import import_module, metadata
from typing import Any

from treeverify.errors import ConfigError


def version() -> str:
    """Return the installed version of SGLang, ``unknown`` if there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "unknown"


def mismatch(name: str, expected: object, found: object) -> ConfigError:
    """Build the error for something that is not as expected."""
    return ConfigError(f"treeverify in SGLang {version()}: {name}: expected {expected}, found {found}")


def find(path: str) -> Any:
    """Import the module of a dotted path and walk to the object that it names; raises ``ConfigError``."""
    names = path.split(".")
    cut = next((i for i, name in enumerate(names) if name[0].isupper()), len(names) - 1)
    module = ".".join(names[:cut])
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise mismatch(module, "a module", error) from error
    for name in names[cut:]:
        found = read(found, name)
    return found


def read(owner: Any, name: str) -> Any:
    """Return an attribute; raises ``ConfigError`` if there is none."""
    try:
        return getattr(owner, name)
    except AttributeError:
        where = owner.__name__ if isinstance(owner, type) or inspect.ismodule(owner) else type(owner).__name__
        raise mismatch(f"{where}.{name}", "to exist", "nothing of that name") from None


def check_parameters(path: str, expected: str) -> None:
    """Check that a function begins with the named parameters (its original, if we replaced it)."""
    wanted, found = expected.split(), list(inspect.signature(find(path)).parameters)
    if len(found) < len(wanted) or any(a not in b.split("|") for a, b in zip(found, wanted, strict=False)):
        raise mismatch(path, f"parameters that begin with {', '.join(wanted)}", ", ".join(found) or "none")


def check_assigned(path: str, names: str) -> None:
    """Check that a class assigns attributes of these names to ``self``."""
    source = inspect.getsource(find(path))
    for name in names.split():
        if not re.search(rf"\bself\.{name}\b.*=", source):
            raise mismatch(f"{path}.{name}", "an assignment in the class", "none")
