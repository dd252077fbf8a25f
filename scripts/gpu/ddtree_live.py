"""Live SGLang servers with plain decoding, DFLASH chains and DDTREE; run by sglang_live.sh with LIVE=ddtree_live.py.

tokens      greedy texts against plain decoding's, alone and sixteen at once, each first difference with its gap
sampling    seeds repeat their texts at temperature 1
law         tokens 2 to 4 of many seeds against the law that a plain server's log-probabilities give
acceptance  one step after each prefix, beside the embedded engine's
gap         GPU time between verify and the next draft; synchronising calls per step beside DFLASH's
host        the scheduler's steps by function: plain decoding, a tree, plain steps of widths by cost
speed       windows of plain, chains (ours, FA3), trees of 8 to 64, widths by cost at 1k, packaged model, bs 1, 4, 16
speed32k    the same at 32k on the random model, whose acceptance means nothing: judge the time of a step
tp2         two GPUs: texts against one GPU's, the same ids on both ranks

Writes ddtree_PART.json after every step of a part, and logs_PART.tar.gz; exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

import ddtree_host
import ddtree_parts
import ddtree_sampling
import ddtree_speed
import live_models
import live_part
from ddtree_servers import AT_ONCE, Choice
from live_part import Part

PARTS = {
    "tokens": ddtree_parts.tokens,
    "sampling": ddtree_sampling.sampling,
    "law": ddtree_sampling.law,
    "acceptance": ddtree_parts.acceptance,
    "gap": ddtree_speed.gap,
    "host": ddtree_host.host,
    "speed": ddtree_speed.speed,
    "speed32k": ddtree_speed.speed32k,
    "tp2": ddtree_parts.tp2,
}
SIDES = ("plain", "dflash-on", *ddtree_speed.TREES, "dflash-fa3")


def main() -> int:
    """Run the parts that were named; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name != "tp2"))
    parser.add_argument("--kind", choices=("eager", "graph"), default="graph")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--draws", type=int, default=2000, help="texts per prompt and server of the law")
    parser.add_argument("--startup", type=float, default=130, help="seconds for the servers of a part to come up")
    parser.add_argument("--seconds", type=float, default=600, help="for each part; the speeds fill them")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, AT_ONCE], help="of the speeds")
    parser.add_argument("--sides", default=",".join(SIDES), help="of the speeds, beside widths by cost")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"expected parts {', '.join(PARTS)}; got {', '.join(unknown)}")
    sides = tuple(options.sides.split(","))
    if unknown := [side for side in sides if side not in SIDES]:
        parser.error(f"expected sides {', '.join(SIDES)}; got {', '.join(unknown)}")
    choice = Choice(options.prompts, options.new, options.draws, tuple(options.batches), sides)
    failed = False
    with tempfile.TemporaryDirectory() as stage:
        models = Path(stage)
        if "speed32k" in parts:
            live_models.target(models / "target")
            live_models.dflash(models / "dflash")
        for name in parts:
            record = options.out / f"ddtree_{name}.json"
            part = Part(name, record, live_part.new_folder(), models, (options.kind,), options.startup, options.seconds)
            part.found["options"] = shlex.join(sys.argv[1:])
            failed |= live_part.run(part, lambda part, name=name: PARTS[name](part, choice))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
