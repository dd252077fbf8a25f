"""Names and shapes of the tensors in each checkpoint, from its configuration alone (no tensor is touched here).

Sources: Hugging Face ``DeepseekV3ForCausalLM`` and SGLang's ``DFlashDraftModel`` state dicts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from treeverify.errors import WeightsError
from treeverify.models.config import DrafterConfig, TargetConfig
from treeverify.models.weights import Shape

_ROPE_TABLE = "rotary_emb.inv_freq"


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


def renamed(tensors: dict[str, torch.Tensor], prefix: str, source: object) -> dict[str, torch.Tensor]:
    """``tensors`` without ``prefix``, at the start of a name or after ``model.``; WeightsError if two become one.

    A model of text and images keeps its language model under ``language_model.``, as SGLang reads it too.
    """
    names = {name: name.removeprefix(prefix) for name in tensors}
    names |= {
        name: "model." + name.removeprefix("model." + prefix) for name in tensors if name.startswith("model." + prefix)
    }
    if len(set(names.values())) < len(names):
        twice = next(name for name, plain in names.items() if plain != name and plain in tensors)
        raise WeightsError(f"{source}: {twice}: the checkpoint holds {names[twice]} too")
    return {names[name]: tensor for name, tensor in tensors.items()}


def target_unused(config: TargetConfig, names: Iterable[str]) -> list[str]:
    """Tensors of layers, embedding, norm and head that ``target_shapes`` does not know, as sorted names.

    Layers of multi-token prediction, stored rope tables and a tied head's copy are not among them.
    """
    names = sorted(names)
    known = {*target_shapes(config), "lm_head.weight" if config.tie_word_embeddings else ""}
    parts = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
    extra = tuple(name.removesuffix("eh_proj.weight") for name in names if name.endswith(".eh_proj.weight"))
    return [
        name
        for name in names
        if name.startswith(parts)
        and name not in known
        and not name.startswith(extra)
        and not name.endswith(_ROPE_TABLE)
    ]


def drafter_unused(config: DrafterConfig, names: Iterable[str]) -> list[str]:
    """Tensors that ``drafter_shapes`` does not know, but copies of the target's embedding and head, and rope tables."""
    known = {*drafter_shapes(config), "embed_tokens.weight", "lm_head.weight"}
    return [name for name in names if name not in known and not name.endswith(_ROPE_TABLE)]


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
