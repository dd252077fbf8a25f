"""The sizes of the two networks, and the `config.json` that each becomes."""

from dataclasses import dataclass
from typing import Any

BOS, EOS = 0, 1
BLOCK = 8


@dataclass(frozen=True)
class TargetShape:
    """A DeepSeek-V3 layout: multi-head latent attention, one dense layer, then mixture-of-experts layers."""

    vocab: int = 2048
    hidden: int = 192
    layers: int = 4
    heads: int = 8
    nope: int = 32
    rope: int = 64
    value: int = 32
    latent: int = 512
    dense: int = 352
    experts: int = 16
    per_token: int = 4
    expert_width: int = 64
    context: int = 4096

    @property
    def mask_id(self) -> int:
        """The last vocabulary entry: no text has it, its embedding row holds the drafter's MASK vector."""
        return self.vocab - 1

    def hf_config(self) -> dict[str, Any]:
        """Return the fields of `config.json`."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense,
            "moe_intermediate_size": self.expert_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.per_token,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_interleave": True,
            "max_position_embeddings": self.context,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "num_nextn_predict_layers": 0,
            "use_cache": True,
        }


@dataclass(frozen=True)
class DrafterShape:
    """DFlash: Qwen3-style layers over one block, target features as extra keys and values."""

    hidden: int = 192
    vocab: int = 2048
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    width: int = 320
    features: tuple[int, ...] = (0, 1, 2)
    target_layers: int = 4
    context: int = 4096

    def hf_config(self) -> dict[str, Any]:
        """Return the fields of `config.json`, as SGLang's DFlash drafter reads them."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": self.context,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "block_size": BLOCK,
            "num_target_layers": self.target_layers,
            "dflash_config": {
                "target_layer_ids": list(self.features),
                "mask_token_id": self.vocab - 1,
                "block_size": BLOCK,
            },
        }
