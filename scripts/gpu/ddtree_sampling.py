"""Parts of the DDTREE run at temperatures above 0: seeds repeat, and the law of tokens 2 to 4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from ddtree_servers import PACKAGED, Choice, config, held, plain_runs, servers_of, starts
from live_part import Part
from live_server import Server, running
from numpy.typing import NDArray

from treeverify.holm import holm
from treeverify.parity.law import LawTest, Tokens, goodness_of_fit

LENGTH = 4
OTHER = -1
"""In place of a token: any that has no cell of its own."""
BATCH = 64
CASES = ((23, 1.0), (8, 0.7), (17, 1.3))
"""(number of the held-out text, temperature). No top-k, top-p or min-p: where a near-tie is at their cut, the
law of another kernel has another support, and the test would judge that."""
PROMPT = 8
ALPHA = 0.001
WRONG = 1.25
"""The temperature of a law that the draws must refute, times the right one."""


def sampling(part: Part, choice: Choice) -> None:
    """At temperature 1 a seed repeats its text; another seed gives another text."""
    servers = servers_of(part, ["ddtree17"])
    with running(part, list(servers.values())):
        prompt = starts(1)[0]
        for mode, server in servers.items():
            texts = []
            for seed in (7, 7, 8):
                (answer,) = server.generate([prompt], 64, sampling=[{"temperature": 1.0, "sampling_seed": seed}])
                texts.append(answer["output_ids"])
            # The first token is SGLang's own draw; texts that share it must agree after it.
            same = texts[0][0] != texts[1][0] or texts[0] == texts[1]
            first = [text[0] for text in texts]
            part.keep(mode, {"first_tokens": first, "same_seed": same, "other": texts[0] != texts[2]})
            if not same:
                part.failures.append(f"{mode}: seed 7 gave two texts after the same first token")


class ServerLaw:
    """Next-token laws after each continuation of a prompt, from a plain server's log-probabilities."""

    def __init__(self, server: Server, prompt: list[int], vocabulary: int) -> None:
        self._server, self._prompt, self._vocabulary = server, prompt, vocabulary
        self._known: dict[Tokens, NDArray[np.float64]] = {}

    def after(self, prefixes: Sequence[Tokens], temperature: float) -> list[NDArray[np.float64]]:
        """Law float64 [vocabulary] after each prefix."""
        unknown = [prefix for prefix in prefixes if prefix not in self._known]
        for begin in range(0, len(unknown), BATCH):
            some = unknown[begin : begin + BATCH]
            ids = [[*self._prompt, *prefix] for prefix in some]
            answers = self._server.generate(ids, 1, return_logprob=True, top_logprobs_num=self._vocabulary)
            for prefix, answer in zip(some, answers, strict=True):
                row = np.full(self._vocabulary, -np.inf)
                for value, token, *_ in answer["meta_info"]["output_top_logprobs"][0]:
                    row[token] = value
                self._known[prefix] = row
        laws = [np.exp((self._known[prefix] - self._known[prefix].max()) / temperature) for prefix in prefixes]
        return [law / law.sum() for law in laws]


def cells(law: ServerLaw, temperature: float, least: float) -> dict[Tokens, float]:
    """Probabilities of continuations of ``LENGTH`` tokens, in cells: what is rarer than ``least`` ends in ``OTHER``."""
    frontier: dict[Tokens, float] = {(): 1.0}
    found: dict[Tokens, float] = {}
    for _ in range(LENGTH):
        grown: dict[Tokens, float] = {}
        for (prefix, mass), row in zip(frontier.items(), law.after(list(frontier), temperature), strict=True):
            kept = {(*prefix, int(token)): mass * float(row[token]) for token in np.flatnonzero(mass * row >= least)}
            grown |= kept
            found[*prefix, OTHER] = max(0.0, mass - sum(kept.values()))
        frontier = grown
    return found | frontier


def cell_of(draw: Tokens, known: set[Tokens]) -> Tokens:
    """The cell of a continuation; ``known`` are the beginnings of all cells."""
    for count in range(1, LENGTH + 1):
        if draw[:count] not in known:
            return (*draw[: count - 1], OTHER)
    return draw


def judged(draws: Counter[Tokens], law: dict[Tokens, float]) -> LawTest:
    """The chi-square test of the draws over the cells of ``law``."""
    known = {cell[:count] for cell in law for count in range(1, LENGTH + 1)}
    counts: Counter[Tokens] = Counter()
    for one, count in draws.items():
        counts[cell_of(one, known)] += count
    return goodness_of_fit(counts, law)


def law(part: Part, choice: Choice) -> None:
    """Draws of DDTREE, of its runs of plain steps, and of plain decoding as a control, against the law.

    A law of a wrong temperature is refuted.

    The expected law is the target's as SGLang computes it, in bfloat16 by its prefill kernels: log-probabilities are
    refused by DDTREE's own server. The first token is the prefill's, drawn by SGLang itself; 2 to 4 come from steps.
    """
    servers = servers_of(part, ["plain", "ddtree17"]) | plain_runs(part, 17, slot=2)
    rows: list[dict[str, Any]] = []
    with running(part, list(servers.values())):
        for number, temperature in CASES:
            prompt = held()[number][:PROMPT]
            expected = ServerLaw(servers["plain"], prompt, config(PACKAGED.target)["vocab_size"])
            factors = {"right": 1.0, "wrong": WRONG}
            laws = {name: cells(expected, temperature * factor, 8 / choice.draws) for name, factor in factors.items()}
            for mode, server in servers.items():
                draws = _draw(server, prompt, temperature, choice.draws)
                tests = {name: judged(draws, one) for name, one in laws.items()}
                rows.append({"prompt": number, "temperature": temperature, "mode": mode} | _rows(tests))
                part.keep("tests", rows)
    adjusted = holm([row["right"]["p_value"] for row in rows])
    part.keep("holm", adjusted)
    for row, p_value in zip(rows, adjusted, strict=True):
        what = f"law: {row['mode']} at temperature {row['temperature']}"
        if p_value < ALPHA:
            part.failures.append(f"{what}: p = {p_value:.2g} after Holm, bound {ALPHA}")
        if row["wrong"]["p_value"] >= ALPHA:
            part.failures.append(f"{what}: a temperature {WRONG}x as high is not refuted")


def _rows(tests: dict[str, LawTest]) -> dict[str, Any]:
    return {
        name: {
            "p_value": test.p_value,
            "frequency_p_value": test.frequency_p_value,
            "statistic": test.statistic,
            "dof": test.dof,
            "draws": test.draws,
            "impossible": test.impossible,
        }
        for name, test in tests.items()
    }


def _draw(server: Server, prompt: list[int], temperature: float, draws: int) -> Counter[Tokens]:
    """Counts of the first ``LENGTH`` tokens of ``draws`` texts, each with a seed of its own."""
    counts: Counter[Tokens] = Counter()
    for begin in range(0, draws, BATCH):
        seeds = range(begin, min(begin + BATCH, draws))
        sampling = [{"temperature": temperature, "sampling_seed": seed} for seed in seeds]
        answers = server.generate([prompt] * len(seeds), LENGTH, sampling=sampling)
        counts.update(tuple(answer["output_ids"]) for answer in answers)
    return counts
