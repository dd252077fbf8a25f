"""Live SGLang servers with the attention backend treeverify, on one GPU; run by sglang_live.sh.

Every server is started in mode off with all modes allowed and switched live. Parts:

packaged    the packaged model, NGRAM: tokens of each mode, eager then graphs; bad settings refused by name
forced      the packaged model at a 3k prompt: off's text continued from every eighth token in off and on
speed       random 8-head model, NGRAM, graphs: off and on in turns at 130, 8k, 32k, bs 1 and 8; Amdahl; FA3; stock
off         what the plugin costs in off beside SGLang without it: two servers of each, in turns
validate    the same server in validate until a million (node, head) rows are compared; what validate costs
algorithms  STANDALONE and DFLASH on the random model: tokens and counters of each mode
dumps       calls kept by a server in validate, replayed against float64
ranks       the random model over two GPUs: tokens and counters per rank, switches while a text is written

Tokens of validate and on may differ from those of off only where the two candidates' log probabilities nearly tie.
Writes live_PART.json after every step of a part, and logs_PART.tar.gz; exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import live_dumps
import live_models
import live_part
import live_speed
import live_tokens
from live_part import Part

PARTS = {
    "packaged": live_tokens.packaged,
    "forced": live_tokens.forced,
    "speed": live_speed.speed,
    "off": live_speed.off,
    "validate": live_speed.validate,
    "algorithms": live_tokens.algorithms,
    "dumps": live_dumps.dumps,
    "ranks": live_tokens.ranks,
}


def main() -> int:
    """Run the parts that were named; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name != "ranks"))
    parser.add_argument("--kinds", default="eager,graph", help="for packaged and algorithms, in this order")
    parser.add_argument("--startup", type=float, default=120, help="seconds for the servers of a part to come up")
    parser.add_argument("--seconds", type=float, default=600, help="for each part; speed fills them")
    options = parser.parse_args()
    parts, kinds = options.parts.split(","), options.kinds.split(",")
    unknown = [name for name in parts if name not in PARTS] + [k for k in kinds if k not in ("eager", "graph")]
    if unknown:
        parser.error(f"expected parts {', '.join(PARTS)} and kinds eager, graph; got {', '.join(unknown)}")
    failed = False
    with tempfile.TemporaryDirectory() as stage:
        models = Path(stage)
        live_models.target(models / "target")
        live_models.dflash(models / "dflash")
        for name in parts:
            part = Part(
                name,
                options.out / f"live_{name}.json",
                live_part.new_folder(),
                models,
                tuple(kinds),
                options.startup,
                options.seconds,
            )
            failed |= live_part.run(part, PARTS[name])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
