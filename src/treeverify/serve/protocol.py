"""The requests of ``treeverify serve``: a part of SGLang's form; what asks for anything else is refused by name.

A field of SGLang that is not served may be there as long as it asks for nothing: null, false, empty, or SGLang's
default. Null for a field that is served means its default.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from treeverify.engine.request import SamplingParams
from treeverify.errors import ConfigError
from treeverify.text import whole

_NO_LIMIT = 2**62
_DEFAULTS: dict[str, object] = {
    "frequency_penalty": 0,
    "log_metrics": True,
    "min_new_tokens": 0,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "routed_experts_start_len": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
"""Fields that are not served and have another default than null, false or nothing, with it."""
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
_NAMED = 8
"""Unknown fields that a refusal names; a body has room for half a million, whose errors hold up the process."""
Ids = Annotated[list[int], Field(fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_is_off(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {k: v for k, v in data.items() if k in cls.model_fields and not cls._off(k, v)}
        unknown = ((k, v) for k, v in data.items() if k not in cls.model_fields and not cls._off(k, v))
        return known | dict(islice(unknown, _NAMED))

    @classmethod
    def _off(cls, name: str, value: object) -> bool:
        if name in cls.model_fields:
            return value is None and name != "max_new_tokens"
        if name in _DEFAULTS:
            return value is None or value == _DEFAULTS[name]
        return any(type(value) is type(nothing) and value == nothing for nothing in _NOTHING)


class Sampling(_Strict):
    """``sampling_params`` of a request; defaults are SGLang's. ``max_new_tokens`` None: to the context's end."""

    max_new_tokens: int | None = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: Ids = []
    sampling_seed: int | None = None

    def engine_params(self, eos: tuple[int, ...]) -> SamplingParams:
        """The engine's parameters; ConfigError for a value out of range. ``eos``: the model's end-of-text ids."""
        stop = (*self.stop_token_ids, *(() if self.ignore_eos else eos))
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            seed=self.sampling_seed,
            max_new_tokens=_NO_LIMIT if self.max_new_tokens is None else self.max_new_tokens,
            stop_token_ids=tuple(dict.fromkeys(stop)),
        )


class GenerateRequest(_Strict):
    """Body of ``/generate``: one prompt. Log-probabilities are those of new tokens only."""

    text: str | None = None
    input_ids: Ids | None = None
    sampling_params: Sampling = Sampling()
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Literal[-1] = -1
    top_logprobs_num: int = Field(default=0, ge=0)

    def check(self) -> None:
        """ConfigError unless there is one prompt, its text is whole, and no field asks for a part of what is off."""
        if self.text is None and self.input_ids is None:
            raise ConfigError("generate: expected either text or input_ids, got neither")
        if self.text and self.input_ids:
            raise ConfigError("generate: expected either text or input_ids, got both")
        for name, text in (("text", self.text), ("rid", self.rid)):
            whole(name, text or "")
        if self.top_logprobs_num and not self.return_logprob:
            raise ConfigError(f"top_logprobs_num: needs return_logprob, got {self.top_logprobs_num} without it")

    @property
    def prompt(self) -> str | list[int]:
        """The one of ``text`` and ``input_ids`` that holds something."""
        if self.input_ids or self.text is None:
            return self.input_ids or []
        return self.text


class SetState(_Strict):
    """Body of ``/set_internal_state``."""

    server_args: dict[str, int | float]

    @field_validator("server_args", mode="before")
    @classmethod
    def _first(cls, value: Any) -> Any:
        """All that a refusal names: only one key is served, so a longer one is refused whatever comes later."""
        return dict(islice(value.items(), _NAMED)) if isinstance(value, dict) else value


def refusal(errors: list[dict[str, Any]]) -> str:
    """One line for pydantic's errors: each field by name, what is wrong, and what came."""
    lines = []
    for error in errors:
        name = ".".join(str(part) for part in error["loc"]) or "body"
        got = "" if error["type"] == "missing" else f", got {error.get('input')!r:.60}"
        what = "not a field that this server serves" if error["type"] == "extra_forbidden" else error["msg"]
        lines.append(f"{name}: {what}{got}")
    return "; ".join(lines)
