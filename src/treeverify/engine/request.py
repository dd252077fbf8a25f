"""One request: what was asked (validated), how far it is, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import CapacityError, ConfigError, ContractError
from treeverify.ops.tree_build.contract import MAX_BUDGET
from treeverify.step.randomness import SEED_LIMIT
from treeverify.tree.law import LawParams

Budget: TypeAlias = int | str | None
"""Draft nodes beside the root; ``"auto"``: chosen for each step by cost; None: the draft mode's default."""
AUTO = "auto"


class DraftMode(StrEnum):
    """How a step's draft is shaped."""

    NONE = "none"  # the root alone: plain decoding
    CHAIN = "chain"  # the drafter's best token at each depth
    TREE = "tree"  # DDTree under a budget of nodes


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # its last token is a stop token
    LENGTH = "length"  # max_new_tokens, or the context is full
    ABORT = "abort"  # the caller asked


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples and when it ends; immutable, ConfigError for a value out of range.

    ``temperature`` 0 is greedy. ``seed`` None draws a fresh one (the result names it). ``stop_token_ids`` None means
    the model's end-of-text ids, () none at all; the stop token itself is the last token of the result.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None
    law: LawParams = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every value; temperature, top_p, top_k and min_p are checked by LawParams."""
        law = LawParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        object.__setattr__(self, "law", law)
        check_int("max_new_tokens", self.max_new_tokens, 1, None)
        if self.seed is not None:
            check_int("seed", self.seed, 0, SEED_LIMIT)
        for token in self.stop_token_ids or ():
            check_int("stop_token_ids", token, 0, None)


@dataclass(frozen=True)
class DraftOptions:
    """Draft mode and budget (nodes beside the root) of one request; ConfigError for anything that is not one.

    ``auto``: a step may use less than the budget, as the engine's policy decides.
    """

    mode: DraftMode
    budget: int
    auto: bool = False

    @classmethod
    def of(cls, mode: str, budget: Budget, widest: int | None = None) -> DraftOptions:
        """Parse; the default budget is 16 for a tree, and for a chain as much as the drafter drafts.

        ``widest``: the most nodes that ``auto`` may use, root included; None where there are no costs to choose by.
        """
        try:
            parsed = DraftMode(mode)
        except ValueError:
            raise ConfigError(f"draft: expected one of {', '.join(DraftMode)}; got {mode!r}") from None
        auto = budget == AUTO
        if auto and (parsed is not DraftMode.TREE or widest is None):
            needed = "draft tree" if parsed is not DraftMode.TREE else "measured costs, which this engine does not have"
            raise ConfigError(f"budget: auto needs {needed}")
        if auto and widest is not None:
            budget = widest - 1
        if budget is None:
            budget = 16 if parsed is DraftMode.TREE else MAX_BUDGET
        check_int("budget", budget, 0, MAX_BUDGET + 1)
        assert isinstance(budget, int | np.integer)
        return cls(parsed, 0 if parsed is DraftMode.NONE else int(budget), auto)

    def width(self, depth: int) -> int:
        """Nodes that a step may verify, root included, with a drafter of ``depth`` tokens."""
        return 1 + (min(self.budget, depth) if self.mode is DraftMode.CHAIN else self.budget)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probabilities at one new token, of the softmax of the target's logits (temperature 1, no cut).

    ``top``: the likeliest ids with theirs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Request:
    """A request's state. ``ids`` [:length] are prompt and new tokens; the KV rows of the first ``committed`` exist.

    While it decodes, committed == length - 1: the last token is the next step's root. ``slots`` [:owned] are pool
    slots in position order; those past ``committed`` are reserved for the draft nodes of the next step. ``width`` nodes
    are the most that a step of it verifies; where slots are short it verifies fewer.
    """

    id: int
    ids: NDArray[np.int64]  # [prompt + max_new]
    prompt_length: int
    params: SamplingParams
    draft: DraftOptions
    seed: int
    width: int
    stop: frozenset[int]
    slots: NDArray[np.int64]  # [the most it can ever own]
    length: int = 0
    owned: int = 0
    committed: int = 0
    decoding: bool = False
    finish: FinishReason | None = None
    acceptance_lengths: list[int] = field(default_factory=list)
    retractions: int = 0
    top_logprobs: int | None = None  # None: no log-probabilities are kept
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @staticmethod
    def most_slots(prompt: int, max_new: int, width: int) -> int:
        """Slots a request owns at most: its last step has all but the final two tokens committed, and its nodes."""
        return prompt if max_new == 1 else prompt + max_new - 2 + width

    @property
    def step_width(self) -> int:
        """Nodes that its next step may verify, root included: ``width``, or as many as it has slots for."""
        return min(self.width, self.owned - self.committed)

    @property
    def group(self) -> tuple[int, bool]:
        """Requests of one group are verified in one call."""
        return self.step_width, self.draft.auto

    @property
    def remaining(self) -> int:
        """New tokens it may still produce."""
        return len(self.ids) - self.length

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far."""
        new: list[int] = self.ids[self.prompt_length : self.length].tolist()
        return new

    @property
    def prefill_goal(self) -> int:
        """Tokens to prefill before it decodes: the prompt, or after a retraction all but the last token."""
        return max(self.prompt_length, self.length - 1)

    @property
    def slots_needed(self) -> int:
        """Slots that it cannot go on without: those of its prefill and of the next step's root, if a step follows."""
        return self.prefill_goal + (self.length > self.prompt_length or self.remaining > 1)

    @property
    def slots_wanted(self) -> int:
        """The same with all nodes of that step, but no more than it may ever own."""
        follows = self.slots_needed > self.prefill_goal
        return min(len(self.slots), self.prefill_goal + (self.width if follows else 0))

    def take(self, tokens: list[int]) -> list[int]:
        """Append tokens up to the first stop token or the limit; returns those kept and sets ``finish``."""
        kept = tokens[: self.remaining]
        for index, token in enumerate(kept):
            if token in self.stop:
                kept, self.finish = kept[: index + 1], FinishReason.STOP
                break
        self.ids[self.length : self.length + len(kept)] = kept
        self.length += len(kept)
        if self.finish is None and self.remaining == 0:
            self.finish = FinishReason.LENGTH
        return kept

    def result(self, finish: FinishReason) -> Result:
        """What came of it."""
        return Result(self.id, self.tokens, finish, self.seed, self.acceptance_lengths, self.retractions, self.logprobs)

    def rewind(self) -> None:
        """Forget all KV rows (its slots were taken back); the tokens stay, and prefill will recompute their rows."""
        self.committed, self.decoding = 0, False
        self.retractions += 1


@dataclass(frozen=True)
class Output:
    """What one engine step added to one request; ``finish`` is set on its last output."""

    request_id: int
    tokens: list[int]
    finish: FinishReason | None
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token where the request asked for them


@dataclass(frozen=True)
class Result:
    """A finished request. Tokens include the stop token that ended it, if one did."""

    request_id: int
    tokens: list[int]
    finish: FinishReason
    seed: int
    acceptance_lengths: list[int]  # one per verify step; the first new token comes from prefill
    retractions: int
    logprobs: list[TokenLogprob]  # one per token where the request asked for them, else none

    @property
    def acceptance(self) -> float:
        """Mean acceptance length of a walk: tokens of all verify steps / steps, root counted; NaN without steps."""
        steps = len(self.acceptance_lengths)
        return sum(self.acceptance_lengths) / steps if steps else float("nan")


def check_int(name: str, value: object, low: int, end: int | None) -> None:
    """ConfigError unless ``value`` is an int (numpy's too, no bool) in low .. end - 1."""
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or value < low or (end is not None and value >= end):  # type: ignore[operator]
        limit = f">= {low}" if end is None else f"{low}..{end - 1}"
        raise ConfigError(f"{name}: expected an integer {limit}, got {value!r}")


def checked_prompt(prompt_ids: Sequence[int], vocab: int, context: int) -> list[int]:
    """The prompt as ints; ContractError if it is empty or an id is out of range, CapacityError if no room is left."""
    if len(prompt_ids) == 0:
        raise ContractError.of("submit", "prompt_ids", "at least one token", "none")
    if len(prompt_ids) >= context:
        raise CapacityError(f"prompt: {len(prompt_ids)} tokens leave no room in a context of {context} tokens")
    for index, token in enumerate(prompt_ids):
        integer = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not integer or not 0 <= token < vocab:
            raise ContractError.of("submit", f"prompt_ids[{index}]", f"an id in 0..{vocab - 1}", repr(token))
    return [int(token) for token in prompt_ids]
