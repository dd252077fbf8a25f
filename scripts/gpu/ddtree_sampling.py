"""Parts of the DDTREE run at temperatures above 0: seeds repeat, and the law of tokens 2 to 4."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from ddtree_servers import PACKAGED, Choice, config, held, servers_of, starts
from live_part import Part
from live_server import Server, running
from numpy.typing import NDArray

from treeverify.parity.law import LawTest, Tokens, exact_joint, goodness_of_fit, holm
from treeverify.parity.plain_law import Setting, plain_law

LENGTH = 4
TOP = 16
"""Log-probabilities asked for; no setting keeps more tokens."""
BATCH = 64
SETTINGS = ((23, Setting(1.0, top_k=8)), (8, Setting(0.7, top_k=6)), (17, Setting(0.7, top_k=16, min_p=0.1)))
"""(number of the held-out text, how its continuation is drawn). None has top-k and top-p at once: SGLang's plain
sampler then cuts by the mass of the whole law, its speculative ones and ours by that of what top-k left."""
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
    """Next-token laws after each continuation of a prompt, from a plain server's log-probabilities at temperature 1."""

    def __init__(self, server: Server, prompt: list[int], vocabulary: int) -> None:
        self._server, self._prompt, self._vocabulary = server, prompt, vocabulary
        self._known: dict[Tokens, dict[int, float]] = {}
        self.setting = Setting(1.0)

    def __call__(self, prefixes: Sequence[Tokens]) -> NDArray[np.float64]:
        """Float64 [len(prefixes), vocabulary] under ``setting``, which keeps at most ``TOP`` tokens."""
        unknown = [prefix for prefix in prefixes if prefix not in self._known]
        for begin in range(0, len(unknown), BATCH):
            some = unknown[begin : begin + BATCH]
            ids = [[*self._prompt, *prefix] for prefix in some]
            answers = self._server.generate(ids, 1, return_logprob=True, top_logprobs_num=TOP)
            for prefix, answer in zip(some, answers, strict=True):
                top = answer["meta_info"]["output_top_logprobs"][0]
                self._known[prefix] = {int(token): float(value) for value, token, *_ in top}
        laws = np.zeros((len(prefixes), self._vocabulary))
        for row, prefix in enumerate(prefixes):
            logits = np.full(self._vocabulary, -math.inf)
            for token, value in self._known[prefix].items():
                logits[token] = value
            for token, probability in plain_law(logits, self.setting).items():
                laws[row, token] = probability
        return laws


def law(part: Part, choice: Choice) -> None:
    """Draws of DDTREE, and of plain decoding as a control, against the law; a law of a wrong temperature is refuted.

    The expected law is the target's as SGLang computes it, in bfloat16 by its prefill kernels: log-probabilities are
    refused by DDTREE's own server. The first token is the prefill's and summed out.
    """
    servers = servers_of(part, ["plain", "ddtree17"])
    rows: list[dict[str, Any]] = []
    with running(part, list(servers.values())):
        for number, setting in SETTINGS:
            prompt = held()[number][:PROMPT]
            expected = ServerLaw(servers["plain"], prompt, config(PACKAGED.target)["vocab_size"])
            laws = {}
            for name, factor in (("right", 1.0), ("wrong", WRONG)):
                expected.setting = Setting(setting.temperature * factor, setting.top_k, setting.top_p, setting.min_p)
                laws[name] = exact_joint(expected, LENGTH, skip=1)
            for mode, server in servers.items():
                counts = _draw(server, prompt, setting, choice.draws)
                tests = {name: goodness_of_fit(counts, one) for name, one in laws.items()}
                rows.append({"prompt": number, "setting": str(setting), "mode": mode} | _rows(tests))
                part.keep("tests", rows)
    adjusted = holm([row["right"]["p_value"] for row in rows])
    part.keep("holm", adjusted)
    for row, p_value in zip(rows, adjusted, strict=True):
        if p_value < ALPHA:
            part.failures.append(f"law: {row['mode']} {row['setting']}: p = {p_value:.2g} after Holm, bound {ALPHA}")
        if row["wrong"]["p_value"] >= ALPHA:
            part.failures.append(f"law: {row['mode']} {row['setting']}: a temperature {WRONG}x as high is not refuted")


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


def _draw(server: Server, prompt: list[int], setting: Setting, draws: int) -> Counter[Tokens]:
    """Counts of tokens 2 to 4 of ``draws`` texts, each with a seed of its own."""
    one = {"temperature": setting.temperature, "top_p": setting.top_p, "min_p": setting.min_p}
    if setting.top_k is not None:
        one["top_k"] = setting.top_k
    counts: Counter[Tokens] = Counter()
    for begin in range(0, draws, BATCH):
        seeds = range(begin, min(begin + BATCH, draws))
        # One more token than is judged, so that the last step is not cut short by the end.
        sampling = [one | {"sampling_seed": seed} for seed in seeds]
        answers = server.generate([prompt] * len(seeds), LENGTH + 1, sampling=sampling)
        counts.update(tuple(answer["output_ids"][1:LENGTH]) for answer in answers)
    return counts
