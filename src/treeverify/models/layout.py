"""Names and shapes of the tensors in each checkpoint, from its configuration alone (no tensor is touched here).

Sources: Hugging Face ``DeepseekV3ForCausalLM`` and SGLang's ``DFlashDraftModel`` state dicts.
"""

from __future__ import annotations

from treeverify.models.config import DrafterConfig, TargetConfig
from treeverify.models.weights import Shape


def target_shapes(config: TargetConfig) -> dict[str, Shape]:
    """Every tensor that a ``DeepseekV3ForCausalLM`` checkpoint must hold (multi-token-prediction layers are extra)."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes |= _attention_shapes(config, prefix + "self_attn.")
        if config.is_moe(layer):
            shapes |= _moe_shapes(config, prefix + "mlp.")
        else:
            shapes |= _mlp_shapes(prefix + "mlp.", hidden, config.intermediate_size)
    return shapes


def drafter_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Every tensor that a DFlash checkpoint must hold; embedding and head are the target's."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
        } | _mlp_shapes(prefix + "mlp.", hidden, config.intermediate_size)
    return shapes


def _attention_shapes(config: TargetConfig, prefix: str) -> dict[str, Shape]:
    heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    shapes: dict[str, Shape] = {
        prefix + "kv_a_proj_with_mqa.weight": (config.row, hidden),
        prefix + "kv_a_layernorm.weight": (latent,),
        prefix + "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
        prefix + "o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        shapes[prefix + "q_proj.weight"] = (queries, hidden)
    else:
        shapes[prefix + "q_a_proj.weight"] = (config.q_lora_rank, hidden)
        shapes[prefix + "q_a_layernorm.weight"] = (config.q_lora_rank,)
        shapes[prefix + "q_b_proj.weight"] = (queries, config.q_lora_rank)
    return shapes


def _moe_shapes(config: TargetConfig, prefix: str) -> dict[str, Shape]:
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts or 0
    shapes: dict[str, Shape] = {
        prefix + "gate.weight": (experts, hidden),
        prefix + "gate.e_score_correction_bias": (experts,),
    }
    for expert in range(experts):
        shapes |= _mlp_shapes(f"{prefix}experts.{expert}.", hidden, width)
    if config.n_shared_experts:
        shapes |= _mlp_shapes(prefix + "shared_experts.", hidden, width * config.n_shared_experts)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }
