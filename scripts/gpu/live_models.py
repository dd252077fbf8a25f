"""Random checkpoints for the live runs: a dense MLA target of 4 layers and 8 heads, and DFlash drafters.

    live_models.py FOLDER        writes FOLDER/target and FOLDER/dflash

Weights are large enough that attention decides the tokens; acceptance on random weights says nothing of a real model.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, LAYERS, HEADS, CONTEXT = 1024, 4096, 4, 8, 40960
Q_RANK, LATENT, NOPE, ROPE, VALUE, INNER = 256, 512, 128, 64, 128, 2048
BLOCK = 8


@dataclass(frozen=True)
class Drafter:
    """Sizes of a DFlash drafter; ``features`` are the layers of the target that it sees."""

    hidden: int = HIDDEN
    inner: int = INNER
    vocabulary: int = VOCAB
    context: int = CONTEXT
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    dim: int = 64
    target_layers: int = LAYERS
    features: tuple[int, ...] = tuple(range(LAYERS - 1))
    attention_gain: float = 1.0
    """Of queries and of keys: the spread of the attention's logits is its square."""
    output_gain: float = 1.0
    """Of the hidden states that the target's head reads: the spread of the drafter's logits grows with it."""


class Weights:
    """Named random matrices of one generator."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.named: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Add a matrix whose output has ``gain`` times the magnitude of its input."""
        values = torch.randn(rows, columns, generator=self.generator, device=self.generator.device)
        self.named[f"{name}.weight"] = (values * gain / columns**0.5).bfloat16().cpu()

    def norm(self, name: str, size: int, gain: float = 1.0) -> None:
        """Add the weight of a norm."""
        self.named[f"{name}.weight"] = torch.full((size,), gain, dtype=torch.bfloat16)

    def mlp(self, prefix: str, hidden: int = HIDDEN, inner: int = INNER) -> None:
        """Add a gated MLP."""
        self.matrix(prefix + "gate_proj", inner, hidden)
        self.matrix(prefix + "up_proj", inner, hidden)
        self.matrix(prefix + "down_proj", hidden, inner)

    def write(self, folder: Path, config: dict[str, Any]) -> None:
        """Write a checkpoint folder."""
        folder.mkdir(parents=True)
        save_file(self.named, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(_COMMON | config, indent=1) + "\n")


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def target(folder: Path) -> None:
    """Write the target; it serves as a STANDALONE drafter as well."""
    weights = Weights(1234)
    weights.named["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=weights.generator).bfloat16()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        weights.norm(prefix + "input_layernorm", HIDDEN)
        weights.norm(prefix + "post_attention_layernorm", HIDDEN)
        weights.matrix(attention + "q_a_proj", Q_RANK, HIDDEN)
        weights.norm(attention + "q_a_layernorm", Q_RANK)
        weights.matrix(attention + "q_b_proj", HEADS * (NOPE + ROPE), Q_RANK, 1.5)
        weights.matrix(attention + "kv_a_proj_with_mqa", LATENT + ROPE, HIDDEN)
        weights.norm(attention + "kv_a_layernorm", LATENT)
        weights.matrix(attention + "kv_b_proj", HEADS * (NOPE + VALUE), LATENT, 1.5)
        weights.matrix(attention + "o_proj", HIDDEN, HEADS * VALUE, 2.0)
        weights.mlp(prefix + "mlp.")
    weights.norm("model.norm", HIDDEN)
    weights.matrix("lm_head", VOCAB, HIDDEN, 4.0)
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    weights.write(
        folder,
        experts
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "q_lora_rank": Q_RANK,
            "kv_lora_rank": LATENT,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": VALUE,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": LAYERS,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "scoring_func": "softmax",
        },
    )


def dflash(folder: Path, sizes: Drafter | None = None, device: str = "cpu") -> None:
    """Write a drafter in the layout that SGLang's DFlashDraftModel loads: no embedding, no head.

    For the target of this module unless ``sizes`` says otherwise; the random numbers are made on ``device``.
    """
    one = sizes or Drafter()
    weights = Weights(99, device)
    weights.matrix("fc", one.hidden, len(one.features) * one.hidden)
    weights.norm("hidden_norm", one.hidden)
    weights.norm("norm", one.hidden, one.output_gain)
    for layer in range(one.layers):
        prefix = f"layers.{layer}."
        attention = prefix + "self_attn."
        weights.norm(prefix + "input_layernorm", one.hidden)
        weights.norm(prefix + "post_attention_layernorm", one.hidden)
        weights.matrix(attention + "q_proj", one.heads * one.dim, one.hidden)
        weights.matrix(attention + "k_proj", one.kv_heads * one.dim, one.hidden)
        weights.matrix(attention + "v_proj", one.kv_heads * one.dim, one.hidden)
        weights.matrix(attention + "o_proj", one.hidden, one.heads * one.dim)
        weights.norm(attention + "q_norm", one.dim, one.attention_gain)
        weights.norm(attention + "k_norm", one.dim, one.attention_gain)
        weights.mlp(prefix + "mlp.", one.hidden, one.inner)
    seen = {"target_layer_ids": list(one.features), "mask_token_id": one.vocabulary - 1, "block_size": BLOCK}
    weights.write(
        folder,
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": one.vocabulary,
            "hidden_size": one.hidden,
            "intermediate_size": one.inner,
            "max_position_embeddings": one.context,
            "num_hidden_layers": one.layers,
            "num_attention_heads": one.heads,
            "num_key_value_heads": one.kv_heads,
            "head_dim": one.dim,
            "block_size": BLOCK,
            "num_target_layers": one.target_layers,
            "dflash_config": seen,
        },
    )


if __name__ == "__main__":
    target(Path(sys.argv[1]) / "target")
    dflash(Path(sys.argv[1]) / "dflash")
