"""The engine's law of tokens against the exact one: tokens 2 to 4 of short continuations, drawn through draft trees.

The first token comes from prefill and is summed out; tokens 2 to 4 come from verify steps, whose walk, cut and commit
are what is judged. One test per (prompt, seed) and one per prompt over all its seeds, Holm-corrected together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treeverify.engine.engine import Engine
from treeverify.engine.request import SamplingParams
from treeverify.errors import ParityError
from treeverify.holm import holm
from treeverify.models.heldout import load_heldout
from treeverify.models.target import Target
from treeverify.parity.law import LawTest, Tokens, exact_joint, goodness_of_fit
from treeverify.parity.plain_law import PlainLaw, Setting
from treeverify.parity.planted import plant
from treeverify.parity.replay import Replay
from treeverify.step.randomness import SEED_LIMIT

NEW_TOKENS = 4
BUDGET = 8
MAX_BATCH = 64
ALPHA = 0.01
SEEDS = (11, 23, 37, 41, 59, 67, 73, 83, 97, 101)
"""The listed seeds of the recorded run."""


@dataclass(frozen=True)
class Case:
    """One prompt, the first ``tokens`` ids of held-out text number ``heldout``, and how its continuation is drawn."""

    heldout: int
    tokens: int
    setting: Setting

    def prompt(self) -> list[int]:
        """The prompt's ids."""
        return load_heldout()[self.heldout].prompt_ids[: self.tokens]


CASES = (
    Case(23, 8, Setting(1.0, top_k=8)),
    Case(8, 8, Setting(0.7, top_k=6)),
    Case(88, 8, Setting(1.3, min_p=0.08)),
    Case(17, 8, Setting(1.0, top_k=12, top_p=0.8)),
    Case(3, 8, Setting(0.9, top_k=16, top_p=0.95, min_p=0.03)),
)

Progress = Callable[[str, int, int], None]
"""(what is done, done so far, of how many: 0 when that is not known)."""


@dataclass(frozen=True)
class CaseResult:
    """One prompt's tests, in the order of the seeds, and the pooled one; ``holm`` values are over the whole run."""

    case: Case
    tests: list[LawTest]
    pooled: LawTest
    holm: list[float]
    pooled_holm: float
    acceptance_length: float  # mean tokens per verify step, root counted

    @property
    def worst(self) -> float:
        """The smallest Holm-adjusted p-value."""
        return min(self.pooled_holm, *self.holm)


def exact_law(target: Target, case: Case, told: Progress | None = None) -> dict[Tokens, float]:
    """The exact joint law of tokens 2 to 4 after the case's prompt; ``target`` is the real one, not a replay."""
    done = 0

    def expanded(count: int) -> None:
        nonlocal done
        done += count
        if told is not None:
            told("exact law, prefixes", done, 0)

    return exact_joint(PlainLaw(target, case.prompt(), case.setting, expanded), NEW_TOKENS, skip=1)


def request_seed(seed: int, case: Case, number: int) -> int:
    """The request seed of draw ``number`` of a listed seed: distinct streams for every (seed, prompt, number)."""
    return int(np.random.SeedSequence((seed, case.heldout, number)).generate_state(1, np.uint64)[0]) % SEED_LIMIT


def draw(engine: Engine, case: Case, seed: int, draws: int, told: Progress | None = None) -> Counter[Tokens]:
    """Counts of tokens 2 to 4 over ``draws`` requests, drafted by trees and batched as the engine likes."""
    setting, prompt = case.setting, case.prompt()
    waiting = [
        engine.submit(
            prompt,
            SamplingParams(
                temperature=setting.temperature,
                top_k=setting.top_k,
                top_p=setting.top_p,
                min_p=setting.min_p,
                seed=request_seed(seed, case, number),
                max_new_tokens=NEW_TOKENS,
                stop_token_ids=(),
            ),
            draft="tree",
            budget=BUDGET,
        )
        for number in range(draws)
    ]
    done = 0
    while engine.busy:
        done += sum(output.finish is not None for output in engine.step())
        if told is not None:
            told("draws", done, draws)
    counts = Counter(tuple(engine.result(request).tokens) for request in waiting)
    if any(len(tokens) != NEW_TOKENS for tokens in counts):
        raise ParityError(f"law: expected {NEW_TOKENS} tokens of every draw, got fewer of some")
    joint: Counter[Tokens] = Counter()
    for tokens, count in counts.items():
        joint[tokens[1:]] += count
    return joint


def law_engine(replay: Replay) -> Engine:
    """An engine with room for `MAX_BATCH` draws of any case."""
    longest = max(case.tokens for case in CASES)
    return replay.engine(MAX_BATCH * (longest + NEW_TOKENS + BUDGET + 1), MAX_BATCH)


def examine(
    replay: Replay,
    law: dict[Tokens, float],
    case: Case,
    seeds: Sequence[int],
    draws: int,
    *,
    planted: str | None = None,
    told: Progress | None = None,
) -> CaseResult:
    """Draw and test one prompt; its ``holm`` values are over its own tests until `correct` spans all cases."""
    engine = law_engine(replay)
    if planted is not None:
        plant(engine, planted)
    counts = [draw(engine, case, seed, draws, told) for seed in seeds]
    engine.audit()
    tests = [goodness_of_fit(count, law) for count in counts]
    pooled = goodness_of_fit(sum(counts, Counter()), law)
    result = CaseResult(case, tests, pooled, [], 1.0, engine.metrics.mean_acceptance)
    return correct([result])[0]


def correct(results: Sequence[CaseResult]) -> list[CaseResult]:
    """Holm's correction over every test of ``results`` together."""
    found = [[*(test.p_value for test in result.tests), result.pooled.p_value] for result in results]
    adjusted = holm([p for row in found for p in row])
    corrected: list[CaseResult] = []
    for result, row in zip(results, found, strict=True):
        mine, adjusted = adjusted[: len(row)], adjusted[len(row) :]
        corrected.append(
            CaseResult(result.case, result.tests, result.pooled, mine[:-1], mine[-1], result.acceptance_length)
        )
    return corrected
