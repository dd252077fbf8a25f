"""Build hook: a wheel carries the libraries that ``make wheel`` compiled into build/prebuilt, if there are any."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltLibraries(BuildHookInterface):  # type: ignore[type-arg]
    """Adds ``treeverify/_prebuilt/*.so`` and the platform to the wheel; without libraries the wheel stays pure."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        libraries = sorted(Path(self.root, "build", "prebuilt").glob("*.so"))
        if version == "editable" or not libraries:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        for library in libraries:
            build_data["force_include"][str(library)] = f"treeverify/_prebuilt/{library.name}"
