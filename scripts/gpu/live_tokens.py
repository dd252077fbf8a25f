"""Parts of the live run that compare tokens: the packaged model, teacher-forced texts, other algorithms."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from live_models import VOCAB
from live_part import Part
from live_server import BY_KIND, MODES, NGRAM, TREE, Server, divergences, running, summary, wide

from treeverify.models.packaged import assets

ASSETS = assets()
SMALL = ["--context-length", "4096", "--max-total-tokens", "40000", "--mem-fraction-static", "0.7"]
MEDIUM = ["--context-length", "8192", "--max-total-tokens", "60000", "--mem-fraction-static", "0.7"]
DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-attention-backend", "triton"]
OURS = ["--attention-backend", "treeverify"]
STEP = 8
"""Tokens that one teacher-forced request continues."""


def packaged(part: Part) -> None:
    """The packaged model with NGRAM trees of 16: one server per kind, tokens of each mode; bad settings are refused."""
    short, long = _held()
    flags = [*OURS, *NGRAM, *SMALL, "--disable-radix-cache"]
    target = ASSETS / "target"
    servers = {
        kind: Server(f"packaged_{kind}", target, n, part.folder, [*flags, *BY_KIND[kind]])
        for n, kind in enumerate(part.kinds)
    }
    eager = [*flags, *BY_KIND["eager"]]
    bad = {
        "KDTREE_VERIFY: expected one of": Server("bad_mode", target, 5, part.folder, eager, KDTREE_VERIFY="yes"),
        "KDTREE_VERIFY_ALLOW: expected": Server("bad_list", target, 6, part.folder, eager, KDTREE_VERIFY_ALLOW="on"),
    }
    try:
        with running(part, list(servers.values())):
            for kind, server in servers.items():
                part.keep(kind, _modes(server, short, long, part.failures))
        for message, server in bad.items():
            if server.process.poll() is None or not server.lines(message):
                part.failures.append(f"{server.name}: not refused by name")
    finally:
        for server in bad.values():
            server.stop()


def algorithms(part: Part) -> None:
    """STANDALONE and DFLASH on the random model: tokens and counters of each mode, the draft's backend included."""
    short, long = _random()
    target, drafter = str(part.models / "target"), str(part.models / "dflash")
    named = {
        "standalone": ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", target, *TREE],
        "dflash": [*DFLASH, "--speculative-draft-model-path", drafter],
    }
    pairs = [(kind, name) for kind in part.kinds for name in named]
    servers = {
        (kind, name): Server(
            f"{name}_{kind}",
            part.models / "target",
            n,
            part.folder,
            [*OURS, *named[name], *BY_KIND[kind], *MEDIUM, "--disable-radix-cache"],
        )
        for n, (kind, name) in enumerate(pairs)
    }
    with running(part, list(servers.values())):
        for (kind, name), server in servers.items():
            judge = servers[kind, "standalone"]  # DFLASH refuses log probabilities
            found = _modes(server, short, long, part.failures, judge)
            part.keep(f"{name}_{kind}", found)
            if name == "standalone" and len(found["summary"]) != 2:
                backends = len(found["summary"])
                part.failures.append(f"{server.name}: {backends} backends, expected the target's and the draft's")


def ranks(part: Part) -> None:
    """The random model over two GPUs (TP 2): tokens and counters of each mode; a switch lands at one step on both.

    The switches that are compared come while a text is being written.
    """
    short, long = _random()
    flags = [*OURS, *NGRAM, *BY_KIND["graph"], *MEDIUM, "--disable-radix-cache", "--tp-size", "2"]
    server = Server("ranks", part.models / "target", 0, part.folder, flags)
    with running(part, [server]):
        part.keep("modes", _modes(server, short, long, part.failures))
        part.keep("switched_at", switches(server, long, 2, part.failures))


def switches(
    server: Server, ids: list[int], ranks: int, failures: list[str], tokens: int = 256
) -> list[dict[int, int]]:
    """Switch while texts are being written; the forward pass at which each rank did, which must be one for all."""
    landed = []
    with ThreadPoolExecutor(1) as pool:
        for mode in ("on", "validate", "off", "on"):
            text = pool.submit(server.generate, [ids], tokens)
            time.sleep(0.2)
            server.switch(mode)
            landed.append({rank["rank"]: rank["switched_at"] for rank in server.state()["ranks"]})
            text.result()
    if any(len(one) != ranks or len(set(one.values())) != 1 for one in landed):
        failures.append(f"{server.name}: switches at forward passes {landed}, expected the same on {ranks} ranks")
    return landed


def forced(part: Part) -> None:
    """Off's text of the 3k prompt, continued from every eighth token in off and on: same tokens, same acceptance?

    One server whose mode is switched live, so that both modes draft from one NGRAM cache, which has seen all of the
    texts before the first measured request. Then both write the text freely, in turns.
    """
    _, long = _held()
    flags = [*OURS, *NGRAM, *SMALL, *BY_KIND["graph"]]
    server = Server("forced", ASSETS / "target", 0, part.folder, flags)
    with running(part, [server]):
        text = server.tokens([long], 192)[0]
        for mode in ("on", "off"):
            server.switch(mode)
            for at in range(0, len(text) - STEP, STEP):
                server.generate([long + text[:at]], STEP)
        rows = []
        for at in range(0, len(text) - STEP, STEP):
            row: dict[str, Any] = {"at": at, "same_as_text": {}}
            for mode in ("off", "on") if at // STEP % 2 else ("on", "off"):
                server.switch(mode)
                answer = server.generate([long + text[:at]], STEP)[0]
                row[mode] = {"tokens": answer["output_ids"], **_steps(answer)}
                row["same_as_text"][mode] = answer["output_ids"] == text[at : at + STEP]
            server.switch("off")
            row["first"] = divergences(server, [long + text[:at]], [row["off"]["tokens"]], [row["on"]["tokens"]])
            rows.append(row)
        free = []
        for turn in range(12):
            mode = ("off", "on")[turn % 2]
            server.switch(mode)
            answer = server.generate([long], 192)[0]
            free.append({"mode": mode, "tokens": answer["output_ids"], **_steps(answer)})
    first = [one for row in rows for one in row["first"]]
    same = [row for row in rows if row["off"]["tokens"] == row["on"]["tokens"]]
    part.found |= {
        "positions": len(rows),
        "same_tokens": len(same),
        "same_tokens_and_steps": sum(row["off"]["steps"] == row["on"]["steps"] for row in same),
        "steps": {mode: sum(row[mode]["steps"] for row in same) for mode in ("off", "on")},
        "divergences": first,
        "free": [{name: value for name, value in one.items() if name != "tokens"} for one in free],
        "free_texts": {mode: [one["tokens"] for one in free if one["mode"] == mode] for mode in ("off", "on")},
        "rows": rows,
    }
    if wide(first):
        part.failures.append(f"forced: {len(wide(first))} divergences that are no near-ties")


def _modes(
    server: Server, short: list[list[int]], long: list[int], failures: list[str], judge: Server | None = None
) -> dict[str, Any]:
    """Tokens of each mode in one server, alone and in a batch, against those of off; then its counters.

    ``judge`` runs the same target and gives the gaps where ``server`` refuses log probabilities.
    """
    tokens: dict[str, dict[str, list[list[int]]]] = {}
    found: dict[str, Any] = {"divergences": {}, "accept": {}}
    server.generate(short, 8)  # compiles Triton's kernels
    for mode in MODES:
        server.switch(mode)
        alone = [server.generate([ids], 64)[0] for ids in [*short, long]]
        together = server.tokens(short, 64)
        tokens[mode] = {"single": [one["output_ids"] for one in alone], "batch": together}
        found["accept"][mode] = [one["meta_info"].get("spec_accept_length") for one in alone]
    found["state"] = server.state()
    found["summary"] = summary(found["state"])
    judge = judge or server
    judge.switch("off")
    for mode in ("validate", "on"):
        for how, prompts in (("single", [*short, long]), ("batch", short)):
            first = divergences(judge, prompts, tokens["off"][how], tokens[mode][how])
            found["divergences"][f"{mode}_{how}"] = {"prompts": len(prompts), "first": first}
            if wide(first):
                failures.append(f"{server.name} {mode} {how}: {len(wide(first))} divergences that are no near-ties")
    failures += [f"{server.name}: {fault}" for fault in faults(found["summary"])]
    found["log"] = server.notes()
    print(json.dumps({"server": server.name, "summary": found["summary"], "failures": failures}), flush=True)
    return found


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the counters of a server that was in every mode, by backend and rank."""
    found = []
    for one in rows:
        judged = {name: one[name] for name in ("rank", "backend", "served", "left_to_parent", "rows", "max_row_ulp")}
        if one["left_to_parent"] or one["mismatched_rows"] or not one["rows"] or not one["served"]["on"]["calls"]:
            found.append(str(judged))
        if one["max_row_ulp"] > 2 or one["within_1_ulp"] < 0.999:
            found.append(f"beyond 2 ULP, or below 99.9% within 1: {judged}")
    return found


def _steps(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    return {"steps": meta.get("spec_verify_ct") or 0, "accept": meta.get("spec_accept_length")}


def _held() -> tuple[list[list[int]], list[int]]:
    """Short held-out prompts, and one of 3000 tokens."""
    held = [prompt["tokens"] for prompt in json.loads((ASSETS / "heldout.json").read_text())["prompts"]]
    return [ids[: 24 + 8 * n] for n, ids in enumerate(held[:8])], [token for ids in held for token in ids][:3000]


def _random() -> tuple[list[list[int]], list[int]]:
    """Short random prompts for the random model, and one of 3000 tokens."""
    draw = random.Random(7)
    short = [[draw.randrange(2, VOCAB) for _ in range(n)] for n in (5, 37, 130, 300, 64, 91, 17, 250)]
    return short, [draw.randrange(2, VOCAB) for _ in range(3000)]
