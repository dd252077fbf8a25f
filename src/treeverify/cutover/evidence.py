"""What a run measured, kept beside its journal, so that a run that goes on after a kill still has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from treeverify.control.schema import PluginState
from treeverify.cutover import replacing
from treeverify.cutover.samples import Sample

_STATES = TypeAdapter(list[PluginState])


class Evidence:
    """Samples and server states of one run in ``folder``, by the name of the moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, name: str, sample: Sample | None, states: Sequence[PluginState]) -> None:
        """Store what was found at ``name``. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if sample is not None:
            replacing.replace(self.folder / f"{name}.sample.json", sample.model_dump_json().encode())
        replacing.replace(self.folder / f"{name}.states.json", _STATES.dump_json(list(states)))

    def sample(self, name: str) -> Sample | None:
        """Return a sample, None where there is none that can be read."""
        try:
            return Sample.model_validate_json((self.folder / f"{name}.sample.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def samples(self) -> dict[str, Sample]:
        """Return all samples, the earliest first."""
        names = self._names(".sample.json")
        return {name: sample for name in names if (sample := self.sample(name)) is not None}

    def states(self) -> dict[str, list[PluginState]]:
        """Return all states, the earliest first."""
        names = self._names(".states.json")
        return {name: _STATES.validate_json((self.folder / f"{name}.states.json").read_bytes()) for name in names}

    def _names(self, suffix: str) -> list[str]:
        paths = sorted(self.folder.glob(f"*{suffix}"), key=lambda path: path.stat().st_mtime_ns)
        return [path.name.removesuffix(suffix) for path in paths]
