"""Fields that change what a model computes: at other values than those computed here, each is refused by its name."""

from __future__ import annotations

import json

import pytest
from tests.toy.checkpoints import DRAFTER, TARGET, drafter_tensors, target_tensors

from treeverify.errors import ConfigError
from treeverify.models.config import DrafterConfig, TargetConfig
from treeverify.models.drafter import Drafter
from treeverify.models.target import Target

BOTH = {
    "sliding_window": 512,
    "use_sliding_window": True,
    "attention_chunk_size": 128,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_sink_bias": True,
    "enable_sink_attention": True,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "activation_function": "relu",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5},
    "partial_rotary_factor": 0.5,
    "rotary_dim": 32,
    "use_qk_norm": True,
    "norm_type": "layernorm",
    "use_gemma_norm": True,
    "post_norm": True,
    "query_pre_attn_scalar": 256,
    "attention_multiplier": 0.5,
    "logit_scale": 0.25,
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "alibi": True,
    "position_embedding_type": "alibi",
    "no_rope_layers": [1, 1, 1, 0],
    "num_kv_shared_layers": 2,
    "dual_chunk_attention_config": {"chunk_size": 8192},
    "swiglu_limit": 7.0,
    "clip_qkv": 8,
    "hc_mult": 4,
    "pruned_heads": {"0": [1]},
    "bidirectional": True,
    "is_encoder_decoder": True,
    "parallel_block": True,
    "weight_offset": 1.0,
    "zero_centered_gamma": True,
}
TARGETS = BOTH | {
    "index_topk": 2048,
    "index_n_heads": 64,
    "indexer_types": ["full", "shared"],
    "layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "linear_attn_config": {"kda_layers": [1]},
    "llama_4_scaling": {"beta": 0.1},
    "mla_nope": True,
    "num_hash_layers": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "zero_expert_num": 2,
    "is_causal": False,
    "architectures": ["DeepseekV32ForCausalLM"],
}
DRAFTERS = BOTH | {
    "layer_types": ["full_attention", "sliding_attention"],
    "is_causal": True,
    "rope_is_neox_style": False,
    "conv_kernel_size": 3,
    "selector_rank": 8,
    "projector_type": "domino",
    "attention_value_scale": 0.5,
    "output_multiplier": 2.0,
    "num_experts": 8,
    "kv_lora_rank": 512,
    "draft_vocab_size": 1000,
    "sample_from_anchor": False,
    "architectures": ["Qwen3DSparkModel"],
}
HARMLESS = {
    "window switched off": {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
    "window of no layer": {"sliding_window": 4096, "layer_types": ["full_attention"] * 4},
    "nothing": {"sliding_window": None, "attention_chunk_size": None, "index_topk": 0, "layer_types": None},
    "plain rope": {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"type": "default", "factor": 1.0}},
    "ones": {"partial_rotary_factor": 1.0, "logit_scale": 1, "residual_multiplier": 1.0, "pretraining_tp": 1},
    "training": {"attention_dropout": 0.1, "initializer_range": 0.02, "router_aux_loss_coef": 0.001, "seq_aux": True},
    "no quantization": {"quantization_config": None, "quantization_config_note": ""},
    "not of a model": {
        "transformers_version": "4.56.2",
        "auto_map": {"AutoModel": "m.M"},
        "_commit_hash": "0a1b",
        "dtype": "bf16",
    },
}
KIMI = {
    "_name_or_path": "", "add_cross_attention": False, "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
    "bad_words_ids": None, "begin_suppress_tokens": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None,
    "diversity_penalty": 0.0, "do_sample": False, "dtype": "bfloat16",
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "ep_size": 1, "exponential_decay_length_penalty": None,
    "finetuning_task": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "hidden_act": "silu",
    "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02, "is_decoder": False, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0}, "length_penalty": 1.0, "max_length": 20, "min_length": 0, "model_type": "kimi_k2",
    "moe_layer_freq": 1, "n_group": 1, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "num_return_sequences": 1, "output_attentions": False,
    "output_hidden_states": False, "output_scores": False, "pad_token_id": 2, "prefix": None, "problem_type": None,
    "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0, "return_dict": True,
    "return_dict_in_generate": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "sep_token_id": None, "seq_aux": True,
    "suppress_tokens": None, "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False,
    "tie_encoder_decoder": False, "tie_word_embeddings": False, "tokenizer_class": None, "top_k": 50, "top_p": 1.0,
    "topk_group": 1, "topk_method": "noaux_tc", "torchscript": False, "transformers_version": "4.56.2",
    "typical_p": 1.0, "use_bfloat16": False, "use_cache": True,
}  # fmt: skip
"""What the language model of Kimi K2.5 says beside its sizes, without its quantization and rope scaling."""
QWEN3 = {
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "layer_types": ["full_attention"] * 2, "max_window_layers": 2, "model_type": "qwen3", "num_target_layers": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "transformers_version": "4.57.3", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
"""What a published drafter for Qwen3 says beside its sizes."""


def write(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize(("name", "value"), TARGETS.items(), ids=TARGETS)
def test_a_target_is_refused_by_the_field(tmp_path, name, value):
    wanted = rf"^{tmp_path}: (rope_scaling|{name}): expected .*, got .*, which is not computed here$"
    with pytest.raises(ConfigError, match=wanted):
        TargetConfig.load(write(tmp_path, TARGET | {name: value}))
    with pytest.raises(ConfigError, match=name.replace("rope_parameters", "rope_scaling")):
        Target(*target_tensors(num_hidden_layers=1, **{name: value}))


@pytest.mark.parametrize(("name", "value"), DRAFTERS.items(), ids=DRAFTERS)
def test_a_drafter_is_refused_by_the_field_at_the_top_or_in_dflash_config(tmp_path, name, value):
    wanted = rf"^{tmp_path}: (rope_scaling|{name}): expected .*, got .*, which is not computed here$"
    for values in (DRAFTER | {name: value}, DRAFTER | {"dflash_config": DRAFTER["dflash_config"] | {name: value}}):
        with pytest.raises(ConfigError, match=wanted):
            DrafterConfig.load(write(tmp_path, values))


def test_a_drafter_in_memory_is_refused_too():
    target = Target(*target_tensors(num_hidden_layers=1))
    with pytest.raises(ConfigError, match="layer_types"):
        Drafter(*drafter_tensors(layer_types=["sliding_attention"] * 2), target)


@pytest.mark.parametrize("values", HARMLESS.values(), ids=HARMLESS)
def test_values_that_change_nothing_are_accepted(tmp_path, values):
    assert TargetConfig.load(write(tmp_path, TARGET | values)).rope_scaling is None
    assert DrafterConfig.load(write(tmp_path, DRAFTER | values)).rope_scaling is None


def test_published_configurations_are_read(tmp_path):
    config = TargetConfig.load(write(tmp_path, TARGET | KIMI))
    assert (config.rope_theta, config.routed_scaling_factor, config.rms_norm_eps) == (50000.0, 2.827, 1e-5)
    assert DrafterConfig.load(write(tmp_path, DRAFTER | QWEN3)).rope_theta == 1e6


def test_a_field_of_the_outer_object_counts_where_the_inner_one_is_silent(tmp_path):
    quantized = {"quantization_config": {"quant_method": "compressed-tensors"}}
    for outer, inner in ((quantized, {}), ({}, quantized), ({"sliding_window": 64}, {})):
        with pytest.raises(ConfigError, match=r"quantization_config|sliding_window"):
            TargetConfig.load(write(tmp_path, outer | {"text_config": TARGET | inner}))
    about_images = {"vision_config": {"hidden_act": "gelu"}, "use_unified_vision_chunk": True, "mm_projector_type": "x"}
    assert TargetConfig.load(write(tmp_path, about_images | {"text_config": TARGET})).row == 576
