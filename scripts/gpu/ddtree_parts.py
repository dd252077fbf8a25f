"""Parts of the DDTREE run that compare texts with plain decoding's, and acceptance with the embedded engine's."""

from __future__ import annotations

import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ddtree_servers import AT_ONCE, Choice, held, servers_of, starts
from live_part import Part
from live_server import Server, divergences, plant, running

NEAR_TIE = 0.5
"""Nats between the two candidates at a first difference. The logits are bfloat16 of magnitude 16 to 32 (spacing 0.125),
and the record of this model's log-probabilities in SGLang against float32 has a largest error of 0.51."""
BUDGET = 16
WITHIN = 0.02
"""Relative difference of the mean acceptance lengths."""
NOTE_IDS = """
import torch
from treeverify.step.step import Step

accept = Step._accept


def noted(self, *arguments):
    found = accept(self, *arguments)
    with open(f"{folder}/rank-{{torch.distributed.get_rank()}}.ids", "a") as file:
        print(found.lengths.tolist(), found.new_tokens.tolist(), file=file)
    return found


def activate():
    Step._accept = noted
"""
"""A plugin of SGLang; a rank waits for its device in each step, which changes no token."""
TWO = ("ddtree17-tp2", "auto33-tp2")
"""Servers over two GPUs: with widths by cost the ranks must choose alike, or what they accept differs."""
TEXTS = 50
CUTS = (40, 100, 160, 220)
"""Tokens of the prefixes of one held-out text."""


def tokens(part: Part, choice: Choice) -> None:
    """Texts of DFLASH's chain and of DDTREE against plain decoding's, alone and in batches; servers do not mix."""
    servers = servers_of(part, ["plain", "dflash", "ddtree17", "auto33"])
    with running(part, list(servers.values())):
        prompts = starts(choice.prompts)
        for how, at_once in (("alone", 1), ("batch", AT_ONCE)):
            part.keep(how, against(part, servers, prompts, choice.new, at_once))
        part.keep("ddtree", {name: servers[name].state("ddtree") for name in ("ddtree17", "auto33")})
        part.keep("notes_auto", servers["auto33"].notes())


def tp2(part: Part, choice: Choice) -> None:
    """Texts over two GPUs against those over one; each rank writes what it accepts to a file, and they are the same."""
    servers = servers_of(part, ["plain", "ddtree17"])
    for two in TWO:
        plugin = plant(part.folder / two, "note_ids", NOTE_IDS.format(folder=str(part.folder / two)))
        path = f"{plugin}:{os.environ.get('PYTHONPATH', '')}"
        servers |= servers_of(part, [two], slot=len(servers), PYTHONPATH=path)
    with running(part, list(servers.values())):
        for how, at_once in (("alone", 1), ("batch", AT_ONCE)):
            part.keep(how, against(part, servers, starts(choice.prompts), choice.new, at_once, base="ddtree17"))
        part.keep("ddtree", {name: servers[name].state("ddtree") for name in TWO})
    ranks = {}
    for two in TWO:
        ids = [file.read_text() for file in sorted((part.folder / two).glob("rank-*.ids"))]
        steps = [text.count("\n") for text in ids]
        ranks[two] = {"steps": steps, "same_ids": len(set(ids)) == 1}
        if len(ids) != 2 or len(set(ids)) != 1 or not steps[0]:
            expected = "two that are the same"
            part.failures.append(f"{two}: files of accepted ids: {len(ids)}, steps {steps}, expected {expected}")
    part.keep("ranks", ranks)


def against(
    part: Part, servers: dict[str, Server], prompts: list[list[int]], new: int, at_once: int, base: str = "plain"
) -> dict[str, Any]:
    """Texts of every server against those of ``base``; plain decoding's server judges the gaps."""
    with ThreadPoolExecutor(len(servers)) as pool:
        running_ = {name: pool.submit(server.each, prompts, new, at_once) for name, server in servers.items()}
        answers = {name: run.result() for name, run in running_.items()}
    texts = {name: [answer["output_ids"] for answer in got] for name, got in answers.items()}
    found = {}
    for name in servers:
        first = divergences(servers["plain"], prompts, texts[base], texts[name])
        found[name] = {
            "prompts": len(prompts),
            "identical": len(prompts) - len(first),
            "first": first,
            "acceptance": _acceptance(answers[name]),
        }
        wide = [one for one in first if one["gap"] is None or one["gap"] > NEAR_TIE]
        if wide and name != base:
            part.failures.append(
                f"{name}, {at_once} at once: {len(wide)} differences that are no near-ties: {wide[:3]}"
            )
    return found


def _acceptance(answers: list[dict[str, Any]]) -> dict[str, float] | None:
    """Tokens per verify step, and SGLang's own figure; None without speculation."""
    meta = [answer["meta_info"] for answer in answers]
    if not all(one.get("spec_verify_ct") for one in meta):
        return None
    steps = sum(one["spec_verify_ct"] for one in meta)
    return {
        "tokens_per_step": sum(one["completion_tokens"] for one in meta) / steps,
        "spec_accept_length": statistics.mean(one["spec_accept_length"] for one in meta),
        "steps": steps,
    }


def acceptance(part: Part, choice: Choice) -> None:
    """One step after each of some prefixes of held-out texts, in the server and in the embedded engine on the CPU.

    A text of two tokens is a prefill and one step, whose whole path is in the histogram of the answer: SGLang's counts
    what was accepted, the text's end inside it or not. A prefix whose first token differs between the two is left out.
    """
    prefixes = [text[:cut] for text in held()[:TEXTS] for cut in CUTS]
    servers = servers_of(part, [f"ddtree{BUDGET + 1}-sync"])
    (server,) = servers.values()
    with ThreadPoolExecutor(1) as pool:
        embedded = pool.submit(_embedded, prefixes)
        with running(part, [server]):
            rows: list[dict[str, Any]] = []
            for ids in prefixes:
                (answer,) = server.generate([ids], 2)
                counts = answer["meta_info"]["spec_correct_drafts_histogram"]
                lengths = [drafts + 1 for drafts, count in enumerate(counts) for _ in range(count)]
                rows.append({"root": answer["output_ids"][0], "server": lengths})
            part.keep("rows", rows)
        for row, (root, length) in zip(rows, embedded.result(), strict=True):
            row["engine"], row["same_root"] = length, row["root"] == root
    _judge(part, rows)


def _judge(part: Part, rows: list[dict[str, Any]]) -> None:
    used = [row for row in rows if row["same_root"] and len(row["server"]) == 1]
    if len(used) < 0.8 * len(rows):
        part.failures.append(f"acceptance: {len(used)} of {len(rows)} prefixes can be compared, expected 80%")
    if not used:
        return
    means = {
        "server": statistics.mean(row["server"][0] for row in used),
        "engine": statistics.mean(row["engine"] for row in used),
    }
    same = sum(row["server"][0] == row["engine"] for row in used)
    part.keep("compared", {"prefixes": len(rows), "used": len(used), "same": same, "means": means})
    if abs(means["server"] / means["engine"] - 1) > WITHIN:
        part.failures.append(f"acceptance: {means}, expected within {WITHIN:.0%}")


def _embedded(prefixes: list[list[int]]) -> list[tuple[int, int]]:
    """First token and acceptance length of the first step after each prefix, by the embedded engine in float32."""
    import torch

    from treeverify.engine.engine import Engine, EngineConfig
    from treeverify.engine.request import SamplingParams
    from treeverify.models.pair import load_pair

    torch.set_num_threads(2)  # the model is small and the machine's cores belong to the servers
    pair = load_pair()
    engine = Engine(pair.target, pair.drafter, config=EngineConfig(verify="off"))
    params = SamplingParams(max_new_tokens=2 + pair.drafter.depth, stop_token_ids=())
    found = []
    for ids in prefixes:
        request = engine.submit(ids, params, budget=BUDGET)
        told: list[list[int]] = []
        while len(told) < 2:
            told += [output.tokens for output in engine.step() if output.tokens]
        engine.abort(request)
        found.append((told[0][0], len(told[1])))
    return found
