"""A random target and DFlash drafter, small enough for Triton's interpreter: few tokens, so that trees are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tests.toy.checkpoints import drafter_tensors, target_tensors

VOCAB, BLOCK = 14, 5
TARGET: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 2,  # no layer has experts
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    # SGLang has no other rotary embedding of this model for a CPU; a factor of 1 is none
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "num_nextn_predict_layers": 0,
}
DRAFTER: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "block_size": BLOCK,
    "num_target_layers": 2,
    "dflash_config": {"target_layer_ids": [0], "mask_token_id": VOCAB - 1, "block_size": BLOCK},
}


def write(folder: Path) -> None:
    """Write ``folder/target`` and ``folder/drafter``."""
    for name, values, (config, tensors) in (
        ("target", TARGET, target_tensors(**(TARGET | {"rope_scaling": None}))),
        ("drafter", DRAFTER, drafter_tensors(**DRAFTER)),
    ):
        (folder / name).mkdir(parents=True)
        written = config.model_dump() | values  # a key left out has another default in transformers
        (folder / name / "config.json").write_text(json.dumps(written))
        gains = _GAINS[name]
        scaled = {
            key: gains.get(key, gains.get(key.split(".")[-2], 1.0)) * value.float() for key, value in tensors.items()
        }
        save_file(scaled, folder / name / "model.safetensors")


_GAINS: dict[str, dict[str, float]] = {
    # Attention must matter more than the last token, or a wrong mask would change nothing.
    "target": {"o_proj": 6.0, "kv_b_proj": 3.0, "kv_a_proj_with_mqa": 3.0, "embed_tokens": 0.05},
    # A flat draft makes a broad tree, which a drafter that knows nothing needs.
    "drafter": {"norm.weight": 0.2},
}
