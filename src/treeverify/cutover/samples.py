"""What a server answers to a fixed plan of prompts: one sample, taken by URL, in whatever mode the server is.

Three parts. *Generations*: each prompt continued greedily, with log-probabilities. *Probes*: the prompt and a piece of
a fixed text, then a few tokens, so that two modes are asked about the same contexts however their texts part. A
server's prefill runs on the parent's kernel in every mode, so the first token of a probe says nothing of ours and is
left out; the others come from verify steps, in SGLang and in the embedded engine alike. *Speed*: the prompts again,
without log-probabilities, timed by this client.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field



class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Prompt(_Frozen):
    """A prompt and the text that is forced after it; both as text, or both as token ids."""

    name: str
    input: str | list[int]
    forced: str | list[int]


class Plan(_Frozen):
    """What to ask; two samples can be compared only if their plans are equal."""

    prompts: list[Prompt] = Field(min_length=1)
    new_tokens: int = Field(default=64, ge=2, description="tokens of each generation")
    probes: int = Field(default=4, ge=0, description="probes of each prompt, spread evenly over its forced text")
    probe_tokens: int = Field(default=8, ge=2, description="tokens after each; the first is prefill's")
    top_logprobs: int = Field(default=20, ge=2)
    speed_passes: int = Field(default=2, ge=0, description="timed passes over all prompts")
    timeout: float = Field(default=120.0, gt=0, description="seconds for one request")

    @classmethod
    def builtin(cls, prompts: int = 24) -> Plan:
        """The first held-out prompts that ship with the package, as text, so that any model can read them."""
        raise NotImplementedError

    @classmethod
    def from_file(cls, path: Path) -> Plan:
        """Prompts from a JSONL file, one object a line: ``{"input": text or ids, "forced": the same}``.

        Raises ConfigError that names file and line.
        """
        raise NotImplementedError


class Position(_Frozen):
    """One generated token: its id, its natural log-probability, and the likeliest ids with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Generation(_Frozen):
    """One prompt's greedy continuation."""

    prompt: str
    positions: list[Position] = Field(description="the first is prefill's")
    verify_steps: int = Field(ge=0, description="0: the server did not speculate")
    accepted: list[int] | None = Field(description="steps by accepted draft tokens, root left out; None: not told")


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
    seconds: float


class Sample(_Frozen):
    """A plan's answers."""

    version: Literal[1] = 1
    taken_at: str = Field(description="ISO 8601, UTC")
    url: str
    mode: str = Field(description="mode that the server reported before the first request")
    plan: Plan
    generations: list[Generation]
    probes: list[Probe]
    speed: list[Window]
    failures: list[str] = Field(description="requests that got no answer, one line each")


Progress = Callable[[int, int, str], None]
"""Called after each request: how many are done, of how many, and what it was."""


def collect(url: str, plan: Plan, on_progress: Progress | None = None) -> Sample:
    """Put ``plan`` to the server at ``url``, one request at a time, and return its answers.

    A request that fails (HTTP error, no connection, timeout) becomes a line of ``failures`` and the rest goes on; the
    gates judge it. Raises ConfigError for an answer that is not in SGLang's form, and where the server cannot be
    reached or does not run the plugin before the first request.
    """
    raise NotImplementedError
