"""Kimi K2.6 as one rank of TP 8 sees it, on one GPU: step time split into attention, MoE and rest, mode off against on.

Hidden size 7168, 8 of 64 heads, all 384 experts with an eighth of their width, an eighth of the vocabulary and of the
dense layer; as many layers as ``--layers`` says (61 do not fit in bf16). Weights are SGLang's dummy ones, made on the
device, in bf16; the published experts are int4, so the MoE share here is larger than theirs, and nothing is
communicated. One server, NGRAM trees of 16, CUDA graphs, batch 1; modes are switched live. Run by sglang_live.sh with
LIVE=kimi_rank.py; writes kimi_rank.json; exit status 1 if a step was not measured.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from live_server import NGRAM, Server

TP = 8
HEADS, EXPERTS, VOCABULARY = 64, 384, 163840
NODES = 16
SPARE = 2048
"""Tokens of the context beyond the longest prefix."""


def geometry(layers: int, context: int) -> dict[str, Any]:
    """The ``config.json`` of one rank's share."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCABULARY // TP,
        "hidden_size": 7168,
        "intermediate_size": 18432 // TP,
        "moe_intermediate_size": 2048 // TP,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS // TP,
        "num_key_value_heads": HEADS // TP,
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
    if any(part in name for part in ("tree_attention", "portable", "merge_kernel", "_fwd_kernel", "extend")):
        return "attention"
    if any(part in name for part in ("moe", "expert", "topk", "gate", "align_block")):
        return "moe"
    return "rest"


def split(trace: Path, layers: int) -> dict[str, Any]:
    """Microseconds per step by part, and the largest kernels, from a profiler's trace of verify steps."""
    with gzip.open(trace, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = sum(any(part in e["name"] for part in ("_fwd_kernel", "tree_attention_portable")) for e in events)
    steps = calls / layers
    parts, names = Counter[str](), Counter[str]()
    for event in events:
        parts[kind(event["name"])] += event["dur"]
        names[event["name"][:90]] += event["dur"]
    return {
        "steps": steps,
        "kernels_per_step": len(events) / steps,
        "us_per_step": {part: total / steps for part, total in parts.items()},
        "largest_us_per_step": {name: total / steps for name, total in names.most_common(12)},
    }


def window(server: Server, ids: list[int], tokens: int) -> dict[str, float]:
    """Milliseconds a verify step takes, prefill (of a prefix in the radix cache) taken off, and tokens per step."""
    begin = time.perf_counter()
    server.generate([ids], 1)
    prefill = time.perf_counter() - begin
    begin = time.perf_counter()
    (answer,) = server.generate([ids], tokens)
    seconds = time.perf_counter() - begin - prefill
    steps = answer["meta_info"]["spec_verify_ct"]
    return {"step_ms": 1e3 * seconds / steps, "accept": tokens / steps}


def profile(server: Server, ids: list[int], folder: Path, layers: int, known: dict[str, float]) -> dict[str, Any]:
    """Profile six verify steps of a running request, of which a window is ``known``."""
    step = known["step_ms"]
    tokens = min(SPARE - 16, round(known["accept"] * max(14, 1500 / step)))
    thread = threading.Thread(target=server.generate, args=([ids], tokens))
    thread.start()
    time.sleep(0.3 + 2e-3 * step)
    before = set(folder.rglob("*.json.gz"))
    server.ask("/start_profile", {"output_dir": str(folder), "num_steps": 6, "activities": ["GPU"]})
    thread.join()
    deadline = time.time() + 30
    while time.time() < deadline:
        fresh = set(folder.rglob("*.json.gz")) - before
        if fresh:
            time.sleep(1.0)
            return split(max(fresh, key=lambda path: path.stat().st_mtime), layers)
        time.sleep(0.2)
    raise RuntimeError("the profiler wrote no trace")


def main() -> int:
    """Start the server, measure each prefix in both modes, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--prefixes", default="2048,30000,100000")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--startup", type=float, default=200)
    options = parser.parse_args()
    prefixes = [int(text) for text in options.prefixes.split(",")]
    context = max(prefixes) + SPARE
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(geometry(options.layers, context)))
    record: dict[str, Any] = {"layers": options.layers, "nodes": NODES, "points": [], "failures": []}
    flags = f"--load-format dummy --context-length {context} --max-total-tokens {2 * context} --max-running-requests 2"
    flags += " --attention-backend treeverify --mem-fraction-static 0.9 --cuda-graph-bs-decode 1"
    server = Server("kimi_rank", folder, 40000, folder, [*flags.split(), *NGRAM], KDTREE_VERIFY_ALLOW="off,on")
    begin = time.time()
    try:
        if not server.wait(begin + options.startup):
            record["failures"].append("the server did not come up")
            print(*server.log.read_text(errors="replace").splitlines()[-25:], sep="\n  | ")
            return 1
        record["up_s"] = time.time() - begin
        for prefix in prefixes:
            record["points"].append(point(server, prefix, folder, options))
            print(json.dumps(record["points"][-1]), flush=True)
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        record["failures"].append(f"{type(error).__name__}: {error}")
    finally:
        server.stop()
        record["seconds"] = time.time() - begin
        (options.out / "kimi_rank.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "kimi_rank.log").write_text(server.log.read_text(errors="replace")[-200_000:])
    return 1 if record["failures"] else 0


def point(server: Server, prefix: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One prefix: alternating windows of both modes, then a profile of each."""
    rng = random.Random(prefix)
    ids = [rng.randrange(2, VOCABULARY // TP) for _ in range(prefix)]
    begin = time.perf_counter()
    server.generate([ids], 2)
    found: dict[str, Any] = {"prefix": prefix, "prefill_s": time.perf_counter() - begin, "windows": []}
    for mode in ("off", "on"):
        server.switch(mode)
        server.generate([ids], 4)
    for _ in range(options.windows):
        pair = {}
        for mode in ("off", "on"):
            server.switch(mode)
            pair[mode] = window(server, ids, 160)
        found["windows"].append(pair)
    for mode in ("off", "on"):
        server.switch(mode)
        known = {key: statistics.median(pair[mode][key] for pair in found["windows"]) for key in ("step_ms", "accept")}
        found[mode] = known | {"profile": profile(server, ids, folder, options.layers, known)}
    found["ratio"] = statistics.median(pair["off"]["step_ms"] / pair["on"]["step_ms"] for pair in found["windows"])
    return found


if __name__ == "__main__":
    sys.exit(main())
