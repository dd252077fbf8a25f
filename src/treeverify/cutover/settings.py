"""What seldom changes from cutover to cutover: a JSON file of the operator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from treeverify.cutover.limits import Limits
from treeverify.cutover.samples import Plan
from treeverify.errors import ConfigError


class Settings(BaseModel):
    """``--settings FILE``; every field may be left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    variables: dict[str, str] = Field(default={}, description="set at every start from now on; needs --allow-restart")
    health_seconds: float = Field(default=1800.0, gt=0, description="for a restart until the server answers")
    limits: Limits = Limits()
    prompts_file: Path | None = Field(default=None, description="JSONL; default: the packaged prompts")
    builtin_prompts: int = Field(default=24, ge=1)
    sampling: dict[str, Any] = Field(default={}, description="fields of samples.Plan other than its prompts")

    @classmethod
    def load(cls, path: Path | None) -> Settings:
        """Return the settings of ``path``, the defaults for None; raises ConfigError that names file and field."""
        if path is None:
            return cls()
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"--settings {path}: {error.strerror}") from None
        except ValidationError as error:
            raise ConfigError(f"--settings {path}: {first_fault(error)}") from None

    def prompts(self, *, logprobs: bool = True) -> Plan:
        """Return the plan of prompts, with or without log-probabilities; raises ConfigError."""
        plan = Plan.builtin(self.builtin_prompts) if self.prompts_file is None else Plan.from_file(self.prompts_file)
        try:
            return Plan.model_validate(plan.model_dump() | self.sampling | {"logprobs": logprobs})
        except ValidationError as error:
            raise ConfigError(f"--settings: sampling: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """Return the first fault that pydantic found, as one line."""
    fault = error.errors()[0]
    return ": ".join([*([".".join(map(str, fault["loc"]))] if fault["loc"] else []), fault["msg"]])
