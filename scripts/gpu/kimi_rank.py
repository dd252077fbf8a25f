"""Kimi K2.6 as one rank of TP 8 sees it, on one GPU: step time split into attention, MoE and rest, mode off against on.

Hidden size 7168, 8 of 64 heads, all 384 experts with an eighth of their width, an eighth of the vocabulary and of the
dense layer; as many layers as ``--layers`` says (61 do not fit in bf16). Weights are SGLang's dummy ones, made on the
device, in bf16; the published experts are int4, so the MoE share here is larger than theirs, and nothing is
communicated. One server, NGRAM trees of 16, CUDA graphs, batch 1; modes are switched live. Run by sglang_live.sh with
LIVE=kimi_rank.py; writes kimi_rank.json after every point; exit status 1 if a step was not measured.

Dummy weights send all tokens to nearly the same few experts, so that the MoE share does not grow with the tree here;
in kimi_trees.py, which compares the algorithms, it does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import live_part
from live_part import Part
from live_server import NGRAM, Server, running
from live_windows import STEPS, Side, medians, prompts_of, ratio, rotate, trace

Event = dict[str, Any]
TP = 8
HEADS, EXPERTS, VOCABULARY = 64, 384, 163840
NODES = 16
PARTS = {
    "attention": ("tree_attention", "portable", "merge_kernel", "_fwd_kernel", "_fwd_grouped", "extend", "flashattn"),
    "communication": ("nccl", "cross_device", "all_reduce", "allreduce", "all_gather"),
    "rest": ("draft_topk", "tree_"),
    "moe": ("moe", "expert", "topk", "gate", "align_block"),
}
"""What names of kernels hold; the first part that fits."""
SPARE = 2048
"""Tokens of the context beyond the longest prefix."""


def geometry(layers: int, context: int, share: int = TP) -> dict[str, Any]:
    """The ``config.json`` of a ``share``-th of the model: of one rank's, 1 for the whole."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCABULARY // share,
        "hidden_size": 7168,
        "intermediate_size": 18432 // share,
        "moe_intermediate_size": 2048 // share,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS // share,
        "num_key_value_heads": HEADS // share,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": context,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "num_nextn_predict_layers": 0,
        "use_cache": True,
    }


def kind(kernel: str) -> str:
    """Part of the step that a kernel belongs to, by its name."""
    name = kernel.lower()
    for part, words in PARTS.items():
        if any(word in name for word in words):
            return part
    return "rest"


def split(events: Sequence[Event]) -> dict[str, Any]:
    """Microseconds per step by part and by graph, and the largest kernels, from a profiler's trace of decode steps.

    Kernels of one CUDA graph share the correlation id of its launch. A graph with experts is the target's, one a step;
    one without them but with attention is a drafter's.
    """
    used = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches: dict[Any, list[Event]] = defaultdict(list)
    parts, names, graphs = Counter[str](), Counter[str](), Counter[str]()
    for one in used:
        launches[one["args"].get("correlation")].append(one)
        parts[kind(one["name"])] += one["dur"]
        names[one["name"][:90]] += one["dur"]
    steps = 0
    for some in launches.values():
        is_target = len(some) > 1 and any("fused_moe" in one["name"] for one in some)
        is_draft = len(some) > 1 and any(kind(one["name"]) == "attention" for one in some)
        graphs["target" if is_target else "draft" if is_draft else "between"] += sum(one["dur"] for one in some)
        steps += is_target
    if not steps:
        raise RuntimeError("trace: no graph of the target")
    return {
        "steps": steps,
        "kernels_per_step": len(used) / steps,
        "us_per_step": {part: total / steps for part, total in parts.items()},
        "us_by_graph": {graph: total / steps for graph, total in graphs.items()},
        "largest_us_per_step": {name: total / steps for name, total in names.most_common(12)},
    }


def main() -> int:
    """Start the server, measure each prefix in both modes, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--prefixes", default="2048,30000,100000")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--startup", type=float, default=200)
    options = parser.parse_args()
    part = Part("kimi_rank", options.out / "kimi_rank.json", live_part.new_folder(), startup=options.startup)
    part.found |= {"layers": options.layers, "nodes": NODES}
    return int(live_part.run(part, lambda part: measure(part, options)))


def measure(part: Part, options: argparse.Namespace) -> None:
    """Every prefix in both modes."""
    prefixes = [int(text) for text in options.prefixes.split(",")]
    context = max(prefixes) + SPARE
    (part.folder / "config.json").write_text(json.dumps(geometry(options.layers, context)))
    flags = f"--load-format dummy --context-length {context} --max-total-tokens {2 * context} --max-running-requests 2"
    flags += " --attention-backend treeverify --mem-fraction-static 0.9 --cuda-graph-bs-decode 1"
    server = Server("kimi_rank", part.folder, 0, part.folder, [*flags.split(), *NGRAM], KDTREE_VERIFY_ALLOW="off,on")
    with running(part, [server]):
        points: list[dict[str, Any]] = []
        for prefix in prefixes:
            prompts = prompts_of(prefix, 1, VOCABULARY // TP)
            points.append({"prefix": prefix} | both_modes(part, server, prompts, options.windows))
            part.keep("points", points)
            print(json.dumps({k: v for k, v in points[-1].items() if k != "windows"}), flush=True)


def both_modes(part: Part, server: Server, prompts: list[list[int]], rounds: int) -> dict[str, Any]:
    """One point: alternating windows of both modes, then a profile of six steps of each."""
    begin = time.perf_counter()
    server.generate(prompts, 2)
    found: dict[str, Any] = {"prefill_s": time.perf_counter() - begin}
    sides = {mode: Side(server, mode) for mode in ("off", "on")}
    windows = rotate(sides, prompts, 0.3, SPARE - 64, rounds=rounds)
    found |= {"step_ratio": ratio(windows, "off", "on", "step_ms"), "windows": windows}
    for mode, side in sides.items():
        where = f"{server.name} {len(prompts[0])} {mode}"
        events = trace(side, part.folder / f"trace_{where.replace(' ', '_')}", prompts, 6, SPARE - 64)
        found[mode] = medians(windows)[mode] | {"profile": split(events)}
        if found[mode]["fewest_steps"] < STEPS:
            part.failures.append(f"{where}: windows of {found[mode]['fewest_steps']} steps, expected {STEPS}")
    return found


if __name__ == "__main__":
    sys.exit(main())
