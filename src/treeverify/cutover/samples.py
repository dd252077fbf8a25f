"""What a server answers to a fixed plan of prompts: one sample, taken by URL, in whatever mode the server is.

Three parts. *Speed*: the prompts, timed by this client, without log-probabilities. *Generations*: each prompt continued
greedily, with log-probabilities. *Probes*: the prompt and a piece of a fixed text, then a few tokens, so that two modes
are asked about the same contexts however their own texts part. A server's prefill runs on the parent's kernel in every
mode, so the first token of a probe says nothing of ours and is left out; the others come from verify steps, in SGLang
and in the embedded engine alike.

The timed passes come first: a drafter that learns from what it served (NGRAM) has then seen the prompts, in the
baseline as in the candidate.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from treeverify.errors import ConfigError
from treeverify.text import json_lines

BUILTIN = Path(__file__).parent / "prompts.jsonl"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Prompt(_Frozen):
    """A prompt and the text that is forced after it; both as text, or both as token ids."""

    name: str
    input: str | list[int]
    forced: str | list[int]

    @model_validator(mode="after")
    def _usable(self) -> Prompt:
        if type(self.input) is not type(self.forced) or not self.input:
            raise ValueError("input and forced: expected two texts or two lists of ids, input not empty")
        for name, value in (("name", self.name), ("input", self.input), ("forced", self.forced)):
            if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
                raise ValueError(f"{name}: expected whole characters, got half of a surrogate pair")
        return self

    def upto(self, offset: int) -> str | list[int]:
        """The prompt and the first ``offset`` characters or ids of its forced text."""
        if isinstance(self.input, str) and isinstance(self.forced, str):
            return self.input + self.forced[:offset]
        return [*self.input, *self.forced[:offset]]


class Plan(_Frozen):
    """What to ask; two samples can be compared only if their plans are equal."""

    prompts: list[Prompt] = Field(min_length=1)
    new_tokens: int = Field(default=64, ge=2, description="tokens of each generation")
    probes: int = Field(default=4, ge=0, description="probes of each prompt, spread evenly over its forced text")
    probe_tokens: int = Field(default=8, ge=2, description="tokens after each; the first is prefill's")
    logprobs: bool = Field(default=True, description="whether they are asked for; False: no probes either")
    top_logprobs: int = Field(default=20, ge=2)
    speed_passes: int = Field(default=2, ge=0, description="timed passes over all prompts")
    timeout: float = Field(default=120.0, gt=0, description="seconds for one request")

    @model_validator(mode="after")
    def _usable(self) -> Plan:
        names = [prompt.name for prompt in self.prompts]
        if len(set(names)) != len(names):
            raise ValueError("prompts: expected names that differ")
        for prompt in self.prompts:
            if self.logprobs and self.probes and len(prompt.forced) <= self.probes:
                raise ValueError(f"prompts: {prompt.name}: forced: expected more than {self.probes} characters or ids")
        return self

    @classmethod
    def builtin(cls, prompts: int = 24, **sizes: Any) -> Plan:
        """The first of the prompts that ship with the package (held-out Python, as text: any model can read them).

        ``sizes``: other fields. ConfigError for more prompts than there are.
        """
        found = cls.from_file(BUILTIN).prompts
        if not 1 <= prompts <= len(found):
            raise ConfigError(f"prompts: expected 1..{len(found)} (the packaged prompts there are), got {prompts}")
        return cls(prompts=found[:prompts], **sizes)

    @classmethod
    def from_file(cls, path: Path, **sizes: Any) -> Plan:
        """Prompts from JSON Lines, one object each: ``{"input": text or ids, "forced": the same, "name": ...}``.

        ``name`` may be left out. Raises ConfigError that names file and line.
        """
        prompts = [_parsed(path, number, line) for number, line in json_lines(path, "prompts")]
        try:
            return cls(prompts=prompts, **sizes)
        except ValidationError as error:
            raise ConfigError(f"{path}: {_first(error)}") from None


class Position(_Frozen):
    """One generated token: its id, its natural log-probability, and the likeliest ids with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Generation(_Frozen):
    """One prompt's greedy continuation."""

    prompt: str
    positions: list[Position] = Field(description="the first is prefill's; empty without log-probabilities")
    ids: list[int] = Field(default=[], description="its tokens, where positions are empty")
    verify_steps: int = Field(ge=0, description="0: the server did not speculate")
    accepted: list[int] | None = Field(description="steps by accepted draft tokens, root left out; None: not told")

    @property
    def tokens(self) -> list[int]:
        """Its token ids."""
        return self.ids or [position.token for position in self.positions]


class Probe(_Frozen):
    """The tokens after a prompt and ``offset`` characters or ids of its forced text; prefill's token left out."""

    prompt: str
    offset: int
    first: int = Field(description="prefill's token: probes of two samples are comparable only if it is the same")
    positions: list[Position]


class Window(_Frozen):
    """One prompt of one timed pass."""

    prompt: str
    run: int
    tokens: int
    seconds: float = Field(gt=0)


class Sample(_Frozen):
    """A plan's answers."""

    version: Literal[1] = 1
    taken_at: str = Field(description="ISO 8601, UTC")
    url: str
    mode: str = Field(description="mode that every rank reported before the first request")
    plan: Plan
    generations: list[Generation]
    probes: list[Probe]
    speed: list[Window]
    failures: list[str] = Field(description="requests that got no usable answer, one line each")


Progress = Callable[[int, int, str], None]
"""Called after each request: how many are done, of how many, and what it was."""


def collect(url: str, plan: Plan, on_progress: Progress | None = None) -> Sample:
    """Put ``plan`` to the server at ``url``, one request at a time, and return its answers.

    A request that fails (HTTP error, no connection, timeout, an answer without usable log-probabilities) becomes a
    line of ``failures`` and the rest goes on; the gates judge it. Raises, before the first request, what
    ``control.client.read_state`` raises, and ConfigError where the ranks are in two modes.
    """
    from treeverify.cutover.asking import Asking

    return Asking(url, plan, on_progress).sample()


def _parsed(path: Path, number: int, line: str) -> Prompt:
    place = f"{path}, line {number}"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{place}: expected an object, got {type(found).__name__}")
    try:
        return Prompt.model_validate({"name": f"line {number}", **found})
    except ValidationError as error:
        raise ConfigError(f"{place}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """The first of pydantic's errors, in one line."""
    found = error.errors()[0]
    place = ".".join(str(part) for part in found["loc"])
    return f"{place}: {found['msg']}" if place else found["msg"]
