"""The requests of ``treeverify serve``: the part of SGLang's form that is understood; other fields are refused."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from treeverify.engine.request import SamplingParams
from treeverify.errors import ConfigError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Sampling(_Strict):
    """``sampling_params`` of a request; defaults are SGLang's."""

    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None

    def engine_params(self, eos: tuple[int, ...]) -> SamplingParams:
        """The engine's parameters; ConfigError for a value out of range. ``eos``: the model's end-of-text ids."""
        stop = (*(self.stop_token_ids or ()), *(() if self.ignore_eos else eos))
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            seed=self.sampling_seed,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=tuple(dict.fromkeys(stop)),
        )


class GenerateRequest(_Strict):
    """Body of ``/generate``. One prompt, answered in one piece; log-probabilities are those of new tokens only."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: Sampling = Sampling()
    rid: str | None = None
    stream: Literal[False] = False
    return_logprob: bool = False
    logprob_start_len: Literal[-1] = -1
    top_logprobs_num: int = Field(default=0, ge=0)

    def check(self) -> None:
        """Raise ConfigError unless exactly one of ``text`` and ``input_ids`` is there."""
        if (self.text is None) == (self.input_ids is None):
            raise ConfigError(
                "generate: expected either text or input_ids, got " + ("both" if self.text else "neither")
            )


class SetState(_Strict):
    """Body of ``/set_internal_state``."""

    server_args: dict[str, int | float]


def refusal(errors: list[dict[str, Any]]) -> str:
    """One line for pydantic's errors: each field by name, what is wrong, and what came."""
    lines = []
    for error in errors:
        name = ".".join(str(part) for part in error["loc"] if part != "body") or "body"
        got = "" if error["type"] == "missing" else f", got {error.get('input')!r:.60}"
        what = "not a field that this server knows" if error["type"] == "extra_forbidden" else error["msg"]
        lines.append(f"{name}: {what}{got}")
    return "; ".join(lines)
