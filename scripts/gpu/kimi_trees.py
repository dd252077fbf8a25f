"""DDTREE beside DFLASH's chain and plain decoding at Kimi K2.6's geometry as one rank of TP 8 sees it, on one GPU.

The target is kimi_rank.py's; the drafter is random, with an eighth of the published ones' heads: six layers on six of
the target's, 8 KV heads of 128 (huggingface.co/z-lab/Kimi-K2.5-DFlash; github.com/tenstorrent/tt-metal/pull/50235),
blocks of 8. Its query heads (64) and the width of its MLP (the target's dense one) are assumed.

ACCEPTANCE IS SIMULATED: every step accepts a drawn number of tokens, on average what the packaged model's drafter has
on free-running texts in benchmarks/results/acceptance.jsonl. So are the experts, drawn evenly for each token
(SGLANG_SIMULATE_UNIFORM_EXPERTS), or wide trees would cost nothing in the MoE. Tokens per second follow from both; the
time of a step does not depend on how many tokens are accepted, so the record has tokens per second at the same file's
teacher-forced lengths as well, which are lower.

Sides, all on the GPU at once, in turns, each point in five windows: plain (Triton), dflash-on (the chain on our
kernel), dflash-fa3, trees of 8, 16, 32 and 64 nodes beside the root; with ``-winN`` the drafter reads the last N tokens
of a prefix. Batches of 1, 4 and 16 at 2k and 30k. With ``--gap`` the GPU's time between verify and draft as well, at
batches of 1 and 16 after the last prefix. Run by sglang_live.sh with LIVE=kimi_trees.py; writes
kimi_trees.json after every point; exit status 1 if something was not measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import live_models
import live_part
import torch
from ddtree_servers import AT_ONCE, Pair, flags, servers_of
from ddtree_speed import GAP_MS, GAP_STEPS, gaps
from kimi_rank import TP, VOCABULARY, geometry, split
from live_part import Part
from live_server import Server, has_fa3, running
from live_windows import STEPS, Side, Windows, medians, prompts_of, ratio, rotate, trace

RECORD = Path(__file__).resolve().parents[2] / "benchmarks/results/acceptance.jsonl"
BASES = ("plain", "dflash-on", "dflash-fa3")
TREES = {f"ddtree{budget + 1}": budget for budget in (8, 16, 32, 64)}
DEFAULT = (*BASES, "ddtree17")
BATCHES = (1, 4, AT_ONCE)
DRAFT_LAYERS = 6
SPARE = 4096
"""Tokens of a context beyond the longest prefix."""
RESERVE = 40
"""Seconds kept for the profiles, in which no further point begins."""
REACHED = 0.9
"""Of the simulated acceptance: trees that end earlier, and the last step of a text, may cost a tenth."""
SHARPNESS = 12.0
"""Standard deviation of the drafter's logits: trees then reach the drawn lengths, and about half of the paths move."""
DUMMY = 1e-3 / 3**0.5
"""Standard deviation of SGLang's dummy weights, which are even between -1e-3 and 1e-3."""


def drafter(folder: Path, layers: int, context: int, share: int = TP) -> dict[str, Any]:
    """Write the drafter of a target of so many layers, a ``share``-th of its heads; returns what is recorded of it."""
    seen = min(DRAFT_LAYERS, layers - 1)
    sizes = live_models.Drafter(
        hidden=(hidden := geometry(layers, context, share)["hidden_size"]),
        inner=18432 // share,
        vocabulary=VOCABULARY // share,
        context=context,
        layers=DRAFT_LAYERS,
        heads=64 // share,
        kv_heads=max(1, 8 // share),
        dim=128,
        target_layers=layers,
        features=tuple(n * (layers - 1) // seen for n in range(seen)),
        attention_gain=2.0,
        output_gain=SHARPNESS / (hidden**0.5 * DUMMY),
    )
    live_models.dflash(folder, sizes, "cuda" if torch.cuda.is_available() else "cpu")
    torch.cuda.empty_cache()  # the servers need it
    return {"layers": DRAFT_LAYERS, "features": sizes.features, "block": live_models.BLOCK}


def without_window(side: str) -> str:
    """The side's name without the drafter's window."""
    return re.sub(r"-win\d+$", "", side)


def is_tree(name: str) -> bool:
    """Whether a side verifies trees."""
    return without_window(name) in TREES


def is_side(name: str) -> bool:
    """Whether there is a side of this name; plain decoding has no drafter."""
    base = without_window(name)
    return base in (*BASES, *TREES) and (base == name or base != "plain")


def lengths(texts: str = "free_running") -> dict[str, float]:
    """Tokens per step of the chain and the trees in the committed record, by the algorithm's name."""
    walk = json.loads(RECORD.read_text().splitlines()[-1])["measures"]["walk"][texts]
    return {"dflash": walk["chain"]} | {name: walk[str(budget)] for name, budget in TREES.items()}


def simulated(mode: str) -> dict[str, str]:
    """Environment of a server of this mode: even experts and, if it drafts a block, simulated acceptance."""
    length = lengths().get(mode.split("-")[0])
    experts = {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}
    if length is None:
        return experts
    return experts | {
        "SGLANG_SIMULATE_ACC_LEN": str(length),
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }


def main() -> int:
    """Start the servers, measure each point, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sides", default=",".join(DEFAULT))
    parser.add_argument("--layers", type=int, default=5, help="5 for four sides at once, 7 for three")
    parser.add_argument("--prefixes", default="2048,30000")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--gap", action="store_true", help="time between verify and draft of the trees")
    parser.add_argument("--startup", type=float, default=180)
    parser.add_argument("--seconds", type=float, default=290)
    options = parser.parse_args()
    if unknown := [side for side in options.sides.split(",") if not is_side(side)]:
        parser.error(f"expected sides of {', '.join([*BASES, *TREES])} or with -winN; got {', '.join(unknown)}")
    record = options.out / "kimi_trees.json"
    part = Part("kimi_trees", record, live_part.new_folder(), startup=options.startup, seconds=options.seconds)
    return int(live_part.run(part, lambda part: measure(part, options)))


def measure(part: Part, options: argparse.Namespace) -> None:
    """Every point, then a profile of each side at the last prefix and batch 1."""
    prefixes = [int(text) for text in options.prefixes.split(",")]
    context = max(prefixes) + SPARE
    target = part.folder / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(geometry(options.layers, context)))
    drafts = drafter(part.folder / "drafter", options.layers, context)
    part.found |= {"layers": options.layers, "of_layers": 61, "drafter": drafts, "simulated_acceptance": lengths()}
    sizes = f"--load-format dummy --speculative-draft-load-format auto --context-length {context} "
    sizes += f"--max-total-tokens {AT_ONCE * context + 8192} --mem-fraction-static 0.95 --chunked-prefill-size 8192"
    names = [name for name in options.sides.split(",") if without_window(name) != "dflash-fa3" or has_fa3()]
    if len(names) < len(options.sides.split(",")):
        part.failures.append("fa3: its library is not in the bundle")
    servers = start(part, names, Pair(target, part.folder / "drafter", tuple(sizes.split())))
    rivals = [server for name, server in servers.items() if without_window(name) == "dflash-fa3"]
    with running(part, [server for server in servers.values() if server not in rivals], rivals) as up:
        sides = {name: Side(server) for name, server in servers.items() if server not in rivals or server in up}
        prompts = points(part, sides, prefixes, options.windows)
        part.keep("ddtree", {name: servers[name].state("ddtree") for name in sides if is_tree(name)})
        part.found["profiles"] = {}
        for name, side in sides.items():
            events = trace(side, part.folder / f"trace_{name}", prompts[:1], 6, SPARE - 64)
            part.found["profiles"][name] = split(events)
            part.write()
        if options.gap:
            part.keep("gaps", {name: between(part, side, prompts) for name, side in sides.items() if is_tree(name)})


def between(part: Part, side: Side, prompts: list[list[int]]) -> dict[str, Any]:
    """Milliseconds from verify to the next draft by batch, with what is aimed at."""
    found = {}
    for batch, aim in GAP_MS.items():
        folder = part.folder / f"gap_{side.server.name}_{batch}"
        events = trace(side, folder, prompts[:batch], GAP_STEPS, SPARE - 64)
        found[str(batch)] = gaps(events) | {"aim_ms": aim}
        print(json.dumps({"side": side.server.name, "batch": batch} | found[str(batch)]), flush=True)
    return found


def start(part: Part, names: list[str], pair: Pair) -> dict[str, Server]:
    """Start a server for each side, with the acceptance that is simulated for it."""
    found: dict[str, Server] = {}
    for slot, name in enumerate(names):
        part.found.setdefault("flags", {})[name] = flags(name, Path("DRAFTER"))[0]
        found |= servers_of(part, [name], pair, slot, **simulated(name))
    return found


def points(part: Part, sides: dict[str, Side], prefixes: list[int], rounds: int) -> list[list[int]]:
    """Windows of all sides at every prefix and batch; returns the last prefix's prompts."""
    found: list[dict[str, Any]] = []
    every = {prefix: prompts_of(prefix, AT_ONCE, VOCABULARY // TP) for prefix in prefixes}
    for prefix in prefixes:
        for batch in BATCHES:
            if part.left() < RESERVE:
                part.failures.append(f"not reached for want of time: prefix {prefix}, batch {batch}")
                continue
            windows = rotate(sides, every[prefix][:batch], 0.3, SPARE - 64, rounds)
            found.append({"prefix": prefix, "batch": batch} | table(windows, batch) | {"windows": windows})
            part.keep("points", found)
            print(json.dumps({k: v for k, v in found[-1].items() if k != "windows"}), flush=True)
            part.failures += short(f"{prefix}, batch {batch}", found[-1]["sides"])
    return every[prefixes[-1]]


def table(windows: Windows, batch: int) -> dict[str, Any]:
    """Medians of each side; its tokens per second and steps over the bases'; tokens per second at other lengths."""
    bases = [name for name in windows if without_window(name) in BASES]
    found: dict[str, Any] = {"sides": medians(windows)}
    for key in ("tokens_per_second", "step_ms"):
        pairs = {base: {way: ratio(windows, base, way, key) for way in windows if way != base} for base in bases}
        found[f"{key}_over"] = pairs
    for texts in ("free_running", "forced_argmax"):
        known = lengths(texts)
        found[f"derived_tokens_per_second_{texts}"] = {
            name: batch * known.get(name.split("-")[0], 1.0) / side["step_ms"] * 1e3
            for name, side in found["sides"].items()
        }
    return found


def short(where: str, sides: dict[str, dict[str, float]]) -> list[str]:
    """Sides whose windows are too few steps, or that did not accept what is simulated."""
    found = []
    for name, side in sides.items():
        wanted = lengths().get(name.split("-")[0], 1.0)
        if side["fewest_steps"] < STEPS:
            found.append(f"{where} {name}: windows of {side['fewest_steps']} steps, expected at least {STEPS}")
        if side["tokens_per_step"] < REACHED * wanted:
            found.append(f"{where} {name}: {side['tokens_per_step']:.2f} tokens a step, simulated {wanted:.2f}")
    return found


if __name__ == "__main__":
    sys.exit(main())
