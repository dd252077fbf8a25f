"""Does a sampler follow the target's law? Exact joint laws of short continuations, and the tests that compare them.

The exact law comes from the model's own next-token laws by the chain rule; the sampler under test (the whole engine)
only contributes counts. Pearson's chi-square over cells of expected count >= 5, everything rarer lumped into one
cell, so the chi-square approximation holds (Cochran's rule); Holm's step-down correction over all tests of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc

from treeverify.errors import ContractError, ParityError

Tokens = tuple[int, ...]
NextLaw = Callable[[Sequence[Tokens]], NDArray[np.float64]]

MIN_EXPECTED = 5.0


@dataclass(frozen=True)
class LawTest:
    """Outcome of one goodness-of-fit test.

    Attributes: ``statistic`` (chi-square), ``dof`` (cells - 1), ``p_value``, ``draws``, ``cells``, and
    ``impossible`` (draws whose exact probability is 0: one of them refutes the sampler, so ``p_value`` is then 0).
    """

    statistic: float
    dof: int
    p_value: float
    draws: int
    cells: int
    impossible: int

    @property
    def frequency_p_value(self) -> float:
        """The chi-square test's alone, impossible draws left out: what a bug with the right support would face."""
        return float(chdtrc(self.dof, self.statistic))


def exact_joint(next_law: NextLaw, length: int, *, skip: int = 0, max_prefixes: int = 20_000) -> dict[Tokens, float]:
    """Exact joint law of tokens ``skip + 1 .. length`` of a continuation, the first ``skip`` marginalised out.

    ``next_law(prefixes)`` returns float64 ``[len(prefixes), vocab]``, the law of the next token after each
    continuation prefix. The law's support must be small (top-k); raises ContractError once more than
    ``max_prefixes`` prefixes would have to be expanded.
    """
    if not 0 <= skip < length:
        raise ContractError.of("exact_joint", "skip", f"in [0, {length})", skip)
    frontier: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        if len(frontier) > max_prefixes:
            raise ContractError.of("exact_joint", "prefixes to expand", f"<= {max_prefixes}", len(frontier))
        prefixes = list(frontier)
        laws = next_law(prefixes)
        grown: dict[Tokens, float] = {}
        for prefix, law in zip(prefixes, laws, strict=True):
            for token in np.flatnonzero(law):
                grown[(*prefix, int(token))] = frontier[prefix] * float(law[token])
        frontier = grown
    joint: dict[Tokens, float] = {}
    for tokens, probability in frontier.items():
        joint[tokens[skip:]] = joint.get(tokens[skip:], 0.0) + probability
    return joint


def goodness_of_fit(counts: Mapping[Tokens, int], law: Mapping[Tokens, float]) -> LawTest:
    """Test observed ``counts`` against the exact ``law`` (probabilities that sum to 1 within 1e-9).

    Raises ParityError when the law does not sum to 1 or fewer than two cells reach the least expected count.
    """
    total = float(sum(law.values()))
    if abs(total - 1.0) > 1e-9:
        raise ParityError(f"goodness_of_fit: law: expected probabilities that sum to 1, got {total!r}")
    draws = sum(counts.values())
    impossible = sum(count for outcome, count in counts.items() if law.get(outcome, 0.0) <= 0.0)
    common = [outcome for outcome, p in law.items() if p * draws >= MIN_EXPECTED]
    observed = [counts.get(outcome, 0) for outcome in common]
    expected = [law[outcome] * draws for outcome in common]
    rest = draws - sum(expected)
    if rest >= MIN_EXPECTED:
        observed.append(draws - impossible - sum(observed))
        expected.append(rest)
    elif expected:  # too little mass for a cell of its own: it joins the rarest common cell
        rarest = int(np.argmin(expected))
        observed[rarest] += draws - impossible - sum(observed)
        expected[rarest] += rest
    if len(expected) < 2:
        raise ParityError(f"goodness_of_fit: law: expected at least 2 cells of count >= 5, got {len(expected)}")
    o, e = np.asarray(observed, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    statistic = float(((o - e) ** 2 / e).sum())
    p_value = 0.0 if impossible else float(chdtrc(len(e) - 1, statistic))
    return LawTest(statistic, len(e) - 1, p_value, draws, len(e), impossible)
