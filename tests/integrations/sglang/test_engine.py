"""A real SGLang engine from request to token, in Triton's interpreter, with a tree: ``make test-sglang``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
pytest.importorskip("sglang", reason="real SGLang: make test-sglang")

from safetensors.torch import save_file  # noqa: E402
from tests.integrations.sglang.processes import HERE, outcome, with_plugin  # noqa: E402

from treeverify.control.schema import PluginState  # noqa: E402

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "max_position_embeddings": 512,
    "rope_theta": 10000,
    "rope_scaling": {  # SGLang's rotary embedding on a CPU needs one
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "num_nextn_predict_layers": 0,
}


def make_model(folder: Path) -> None:
    """A dense MLA model with random weights, large enough that attention decides the tokens."""
    generator = torch.Generator().manual_seed(3)
    hidden, heads, latent = CONFIG["hidden_size"], CONFIG["num_attention_heads"], CONFIG["kv_lora_rank"]
    nope, rope, value, inner = 64, 64, 64, CONFIG["intermediate_size"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(CONFIG["vocab_size"], hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(CONFIG["vocab_size"], hidden, 2.0),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": matrix(heads * (nope + rope), hidden, 2.0),
            prefix + "self_attn.kv_a_proj_with_mqa.weight": matrix(latent + rope, hidden, 1.5),
            prefix + "self_attn.kv_a_layernorm.weight": torch.ones(latent),
            prefix + "self_attn.kv_b_proj.weight": matrix(heads * (nope + value), latent, 1.5),
            prefix + "self_attn.o_proj.weight": matrix(hidden, heads * value, 3.0),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("engine")
    make_model(folder)
    (folder / "oracle.json").write_text("[]")
    return outcome(
        str(HERE / "engine_run.py"),
        folder,
        PYTHONPATH=with_plugin(folder / "site", "engine_plugin"),
        SGLANG_PLUGINS="treeverify,engine_plugin",
        ORACLE_FILE=str(folder / "oracle.json"),
        BREAK_FILE=str(folder / "break"),
        KDTREE_VERIFY="off",
        KDTREE_VERIFY_ALLOW="off,validate,on",
    )


def test_each_mode_gives_the_tokens_of_off_after_a_live_switch(played: dict[str, Any]) -> None:
    assert [played[f"switch_{mode}"] for mode in ("off", "validate", "on")] == [[True]] * 3
    assert played["off"] == played["validate"] == played["on"] == played["plain"]
    assert played["accept_off"] == played["accept_validate"] == played["accept_on"] > 1.5 > played["accept_plain"]


def test_switches_in_the_middle_of_a_text_leave_it_as_it_is(played: dict[str, Any]) -> None:
    assert played["middle"] == played["plain"][0]


def test_the_state_tells_what_each_mode_served(played: dict[str, Any]) -> None:
    state = PluginState.model_validate_json(json.dumps(played["state"]))
    (rank,) = state.ranks
    (backend,) = rank.backends
    assert (rank.mode, rank.allowed) == ("on", ["off", "validate", "on"])
    assert rank.switches == 3 + 4  # the two that were refused do not count
    assert rank.switched_at > 0
    assert min(counts.calls for counts in backend.served.values()) >= 2
    assert backend.left_to_parent == {}
    assert backend.breaches == 0
    assert [layer.layer for layer in backend.layers] == [0, 1]
    assert sum(layer.mismatched_rows for layer in backend.layers) == 0
    assert max(layer.max_row_ulp for layer in backend.layers) < 0.1  # float32 on both sides
    assert {shape.nodes for shape in backend.shapes} == {4}


def test_a_bad_mode_is_refused_to_the_client(played: dict[str, Any]) -> None:
    assert played["refused"] == [[False], [False]]


def test_a_dropped_mask_is_caught_by_validate_and_changes_the_tokens_of_on(played: dict[str, Any]) -> None:
    assert played["broken_on"] != played["plain"]
    assert played["broken_validate"] == played["plain"]  # which serves the parent
    state = PluginState.model_validate_json(json.dumps(played["broken_state"]))
    backend = state.ranks[0].backends[0]
    assert backend.breaches > 0
    assert max(layer.max_row_ulp for layer in backend.layers) > backend.bound_ulp
