"""Servers of the DDTREE run: plain decoding, DFLASH's chain, trees."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live_part import Part
from live_server import FA3, Server, plant

from treeverify.models.packaged import assets

ASSETS = assets()
AT_ONCE = 16
BY_KIND = {
    "eager": ["--cuda-graph-backend-decode", "disabled"],
    "graph": ["--cuda-graph-bs-decode", "1", "2", "4", "8", "16"],
}
SMALL = ["--context-length", "4096", "--max-total-tokens", "70000"]


@dataclass(frozen=True)
class Choice:
    """How many prompts, new tokens per text, and texts per prompt of the law; batches and sides of the speeds."""

    prompts: int
    new: int
    draws: int
    batches: tuple[int, ...] = (1, 4, AT_ONCE)
    sides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, and the flags that size their servers."""

    target: Path
    drafter: Path
    sizes: tuple[str, ...]


FORCED = """
def forced(stock):
    def plan(self, *arguments):
        found = stock(self, *arguments)
        return found._replace(width=1, run=4, kind=found.kind._replace(rung=0))

    return plan


def activate():
    from treeverify.integrations.sglang.ddtree.choice import Choice

    Choice.plan = forced(Choice.plan)
"""
"""A plugin of SGLang: widths by cost never draft, whatever they cost."""
PACKAGED = Pair(ASSETS / "target", ASSETS / "drafter", (*SMALL, "--disable-radix-cache"))


def config(model: Path) -> dict[str, Any]:
    """The model's configuration."""
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


def flags(mode: str, drafter: Path) -> tuple[list[str], str]:
    """Flags of a server and its KDTREE_VERIFY: plain, dflash[-on|-fa3], ddtreeN[-triton][-sync], N nodes with the root.

    ``autoN`` is ddtreeN with widths by cost. ``-winN`` lets the drafter read the last N tokens of a prefix; a last
    ``-tp2`` spreads any of them over two GPUs.
    """
    name, *options = mode.split("-")
    ranks = ["--tp-size", "2"] if "tp2" in options else []
    if name == "plain":
        return ["--attention-backend", "triton", *ranks], "off"
    ours = "on" in options if name == "dflash" else "triton" not in options
    attention = FA3 if "fa3" in options else ["--attention-backend", "treeverify" if ours else "triton"]
    draft = ["--speculative-draft-attention-backend", "triton", "--speculative-draft-model-path", str(drafter)]
    if name == "dflash":
        algorithm = ["--speculative-algorithm", "DFLASH"]
    else:
        nodes = name.removeprefix("ddtree").removeprefix("auto")
        algorithm = ["--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", nodes]
    for window in (option.removeprefix("win") for option in options if option.startswith("win")):
        draft += ["--speculative-draft-window-size", window]
    sync = ["--disable-overlap-schedule"] if "sync" in options else []
    return [*attention, *draft, *algorithm, *sync, *ranks], "on" if ours else "off"


def servers_of(
    part: Part, modes: list[str], pair: Pair = PACKAGED, slot: int = 0, **environment: str
) -> dict[str, Server]:
    """Start one server per mode; the first of them takes ``slot``."""
    found = {}
    for number, mode in enumerate(modes):
        given, verify = flags(mode, pair.drafter)
        share = ["--max-running-requests", str(AT_ONCE), "--mem-fraction-static", "0.7"]
        every = [*given, *share, *pair.sizes, *BY_KIND[part.kinds[0]]]
        settings = {"KDTREE_VERIFY": verify, "KDTREE_VERIFY_ALLOW": verify} | environment
        if mode.startswith("auto"):
            settings["KDTREE_BUDGET"] = "auto"
        found[mode] = Server(mode, pair.target, slot + number, part.folder, every, **settings)
    return found


def plain_runs(part: Part, top: int, slot: int, path: str = "") -> dict[str, Server]:
    """A server with widths by cost up to ``top`` that is held to its runs of plain steps; ``path``: of more plugins."""
    plugin = plant(part.folder / "forced", "forced_plain", FORCED)
    path = f"{plugin}:{path or os.environ.get('PYTHONPATH', '')}"
    return servers_of(part, [f"auto{top}"], slot=slot, PYTHONPATH=path, KDTREE_LADDER=f"1,{top}")


def held() -> list[list[int]]:
    """The held-out texts."""
    return [prompt["tokens"] for prompt in json.loads((ASSETS / "heldout.json").read_text())["prompts"]]


def starts(prompts: int) -> list[list[int]]:
    """Held-out prompts of 32 tokens."""
    texts = held()
    return [texts[n % len(texts)][n // len(texts) * 64 :][:32] for n in range(prompts)]
