"""Random checkpoints of the packaged model's shape (fixed seed), in memory or on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from treeverify.models import layout
from treeverify.models.config import DrafterConfig, TargetConfig

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "block_size": 8,
    "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 2047, "block_size": 8},
}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Unit-gain matrices, norms near one, small biases; bf16 except the routing bias."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = value * 0.05
        elif len(shape) == 1:
            tensors[name] = (1 + 0.1 * value).bfloat16()
        elif "embed_tokens" in name:
            tensors[name] = value.bfloat16()
        else:
            gain = 3.0 if "lm_head" in name else 1.2
            tensors[name] = (value * gain / shape[-1] ** 0.5).bfloat16()
    return tensors


def target_tensors(**changes: object) -> tuple[TargetConfig, dict[str, torch.Tensor]]:
    config = TargetConfig.model_validate(TARGET | changes)
    return config, random_tensors(layout.target_shapes(config), seed=11)


def drafter_tensors(**changes: object) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    config = DrafterConfig.model_validate(DRAFTER | changes)
    return config, random_tensors(layout.drafter_shapes(config), seed=12)


def write_pair(folder: Path) -> Path:
    """A folder with target/ and drafter/ in their checkpoint layouts."""
    for name, values, (_, tensors) in (("target", TARGET, target_tensors()), ("drafter", DRAFTER, drafter_tensors())):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(values))
        save_file(tensors, folder / name / "model.safetensors")
    return folder
