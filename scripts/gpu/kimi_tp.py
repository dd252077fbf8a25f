"""Kimi K2.6's geometry over several GPUs, tensor parallel as deployed: NGRAM and DDTREE, off, validate, on, the switch.

64 heads, hidden size 7168, all 384 experts, the whole vocabulary, split over ``--tp`` ranks by SGLang itself; as many
layers as fit in bf16 (the published experts are int4). Weights are SGLang's dummy ones, made on the devices; experts
are drawn evenly for each token, and DDTREE's acceptance is SIMULATED, as in kimi_trees.py, which says why; what NGRAM
accepts means nothing. One server after the other, CUDA graphs, batch 1, every mode allowed and switched live:

- at each prefix, alternating windows of off and on, rank 0's profile of six steps of each, then a text in validate;
- switches while texts are written: every rank at one forward pass;
- counters of each rank: as many rows and calls on all, within the bound, nothing left to Triton.

Run by sglang_live.sh with LIVE=kimi_tp.py; writes kimi_tp.json after every point; exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import live_part
from ddtree_servers import flags
from kimi_rank import SPARE, VOCABULARY, both_modes, geometry
from kimi_trees import drafter, lengths, simulated
from live_part import Part
from live_server import NGRAM, Server, running, summary
from live_tokens import faults, switches
from live_windows import Side, length, prompts_of, window

ALGORITHMS = ("ngram", "ddtree17")
LAYERS_PER_GPU = 3
"""And one without experts: one layer's experts are 33.8 GB in bf16."""
VALIDATED = 32
"""Tokens of a text that is written in validate."""


def main() -> int:
    """Start one server after the other, measure each prefix, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--layers", type=int, help=f"default: 1 + {LAYERS_PER_GPU} for each GPU")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--prefixes", default="2048,30000,100000")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--startup", type=float, default=240)
    options = parser.parse_args()
    if unknown := set(options.algorithms.split(",")) - set(ALGORITHMS):
        parser.error(f"expected algorithms of {', '.join(ALGORITHMS)}; got {', '.join(sorted(unknown))}")
    if options.layers is None:
        options.layers = 1 + LAYERS_PER_GPU * options.tp
    part = Part("kimi_tp", options.out / "kimi_tp.json", live_part.new_folder(), startup=options.startup)
    return int(live_part.run(part, lambda part: measure(part, options)))


def measure(part: Part, options: argparse.Namespace) -> None:
    """Every algorithm: a server, its points, its switches, its counters."""
    prefixes = [int(text) for text in options.prefixes.split(",")]
    context = max(prefixes) + SPARE
    target = part.folder / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(geometry(options.layers, context, 1)))
    part.found |= {"tp": options.tp, "layers": options.layers, "of_layers": 61, "simulated_acceptance": lengths()}
    for slot, algorithm in enumerate(options.algorithms.split(",")):
        if algorithm != "ngram":
            part.keep("drafter", drafter(part.folder / "drafter", options.layers, context, 1))
        server = start(part, algorithm, slot, context, options.tp)
        found: dict[str, Any] = {"points": []}
        part.found[algorithm] = found
        with running(part, [server]):
            for prefix in prefixes:
                found["points"].append(point(part, server, prefix, options.windows))
                part.write()
            found["switched_at"] = switched(part, server, prefixes[0], options.tp)
            found["ranks"] = summary(server.state())
            found["log"] = server.notes()
            part.failures += [f"{server.name}: {fault}" for fault in disagreements(found["ranks"], options.tp)]
            part.write()


def start(part: Part, algorithm: str, slot: int, context: int, tp: int) -> Server:
    """One server over ``tp`` GPUs in which every mode is allowed."""
    sizes = f"--load-format dummy --context-length {context} --max-total-tokens {2 * context} --max-running-requests 2 "
    sizes += f"--tp-size {tp} --mem-fraction-static 0.9 --cuda-graph-bs-decode 1"
    if algorithm == "ngram":
        given = ["--attention-backend", "treeverify", *NGRAM]
    else:
        given = [*flags(algorithm, part.folder / "drafter")[0], "--speculative-draft-load-format", "auto"]
    every = [*given, *sizes.split()]
    return Server(f"kimi_tp_{algorithm}", part.folder / "target", slot, part.folder, every, **simulated(algorithm))


def point(part: Part, server: Server, prefix: int, rounds: int) -> dict[str, Any]:
    """One prefix: off and on in turns with rank 0's profile of each, then a text in validate."""
    prompts = prompts_of(prefix, 1, VOCABULARY)
    found = {"prefix": prefix} | both_modes(part, server, prompts, rounds)
    server.switch("validate")
    server.generate(prompts, VALIDATED)
    found["validate"] = summary(server.state())
    server.switch("off")
    print(json.dumps({k: v for k, v in found.items() if k not in ("windows", "validate")}), flush=True)
    return found


def switched(part: Part, server: Server, prefix: int, tp: int) -> list[dict[int, int]]:
    """Switches in the middle of texts that take a second in ``on``, the fastest mode."""
    prompts = prompts_of(prefix, 1, VOCABULARY)
    server.switch("on")
    tokens = length(window(Side(server), prompts, 64), 1.0, SPARE - 64)
    server.switch("off")
    return switches(server, prompts[0], tp, part.failures, tokens)


def disagreements(rows: list[dict[str, Any]], ranks: int) -> list[str]:
    """What is wrong with the counters of the ranks: those of each alone, and counts that differ between them."""
    found = faults([one for one in rows if one["backend"] == "target"])
    if sorted({one["rank"] for one in rows}) != list(range(ranks)):
        found.append(f"ranks {sorted({one['rank'] for one in rows})}, expected {ranks}")
    for name in ("rows", "served", "left_to_parent", "breaches", "layers"):
        each = [one[name] for one in rows if one["backend"] == "target"]
        if any(one != each[0] for one in each):
            found.append(f"{name} differ between ranks: {each}")
    return found


if __name__ == "__main__":
    sys.exit(main())
