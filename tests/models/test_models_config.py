"""Reading configurations and checkpoints: what is accepted, and the one line that says what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.toy.checkpoints import DRAFTER, TARGET, target_tensors, write_pair

from treeverify.errors import ConfigError, WeightsError
from treeverify.models import weights
from treeverify.models.config import DrafterConfig, TargetConfig
from treeverify.models.pair import load_pair


def one_line(caught) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(tmp_path, values):
    (tmp_path / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return tmp_path


def test_a_config_is_read(tmp_path):
    config = TargetConfig.load(write(tmp_path, TARGET))
    assert (config.row, config.context, config.eos_token_ids) == (576, 1024, (1,))
    assert [config.is_moe(layer) for layer in range(4)] == [False, True, True, True]
    assert TargetConfig.model_validate(TARGET | {"eos_token_id": [1, 5]}).eos_token_ids == (1, 5)
    assert TargetConfig.model_validate(TARGET | {"eos_token_id": None}).eos_token_ids == ()


def test_a_nested_text_config_is_used_as_in_kimi_k2(tmp_path):
    inner = {k: v for k, v in TARGET.items() if k != "architectures"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "vision_config": {}, "text_config": inner}
    assert TargetConfig.load(write(tmp_path, outer)).kv_lora_rank == 512


def test_newer_rope_parameters_are_read():
    values = {k: v for k, v in TARGET.items() if k != "rope_theta"}
    plain = TargetConfig.model_validate(values | {"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}})
    assert (plain.rope_theta, plain.rope_scaling) == (5e4, None)
    scaled = TargetConfig.model_validate(values | {"rope_parameters": {"rope_theta": 5e4, "rope_type": "yarn"}})
    assert scaled.rope_scaling is not None


def test_a_model_without_mla_is_refused_by_architecture(tmp_path):
    values = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    with pytest.raises(ConfigError) as caught:
        TargetConfig.load(write(tmp_path, values))
    text = one_line(caught)
    assert "LlamaForCausalLM" in text
    assert "kv_lora_rank is missing" in text
    with pytest.raises(ConfigError, match=r"LlavaForX.*kv_lora_rank"):
        TargetConfig.load(write(tmp_path, {"architectures": ["LlavaForX"], "text_config": {"hidden_size": 64}}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object"),
        (TARGET | {"hidden_size": -1}, "hidden_size"),
        ({k: v for k, v in TARGET.items() if k != "v_head_dim"}, "v_head_dim"),
        (TARGET | {"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
        (TARGET | {"attention_bias": True}, "attention_bias"),
        (TARGET | {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    ],
)
def test_bad_target_configs(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        TargetConfig.load(write(tmp_path, values))
    assert str(tmp_path) in one_line(caught)


def test_a_missing_config(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        TargetConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({k: v for k, v in DRAFTER.items() if k != "dflash_config"}, "not a DFlash drafter.*dflash_config is missing"),
        (DRAFTER | {"num_key_value_heads": 3}, "num_attention_heads: expected a multiple"),
        (DRAFTER | {"vocab_size": 2047}, "mask_token_id"),
        (DRAFTER | {"dflash_config": DRAFTER["dflash_config"] | {"block_size": 1}}, "block_size"),
        (DRAFTER | {"dflash_config": DRAFTER["dflash_config"] | {"target_layer_ids": []}}, "target_layer_ids"),
    ],
)
def test_bad_drafter_configs(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        DrafterConfig.load(write(tmp_path, values))
    one_line(caught)


def test_a_drafter_of_another_target_is_refused():
    drafter, target = DrafterConfig.model_validate(DRAFTER), TargetConfig.model_validate(TARGET)
    drafter.check_against(target)
    with pytest.raises(ConfigError, match="hidden_size: expected the target's 256, got 192"):
        drafter.check_against(TargetConfig.model_validate(TARGET | {"hidden_size": 256}))
    with pytest.raises(ConfigError, match=r"target_layer_ids: expected 0..1, got \[2\]"):
        drafter.check_against(TargetConfig.model_validate(TARGET | {"num_hidden_layers": 2}))


def test_checkpoints_load_whole_or_in_shards(tmp_path):
    _, tensors = target_tensors(num_hidden_layers=1)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, tmp_path / "b.safetensors")
    index = {name: "a.safetensors" if i < 5 else "b.safetensors" for i, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    loaded = weights.load(tmp_path)
    assert sorted(loaded) == names
    assert all(torch.equal(loaded[name], tensors[name]) for name in names)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"b\.safetensors"):
        weights.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="not a safetensors index"):
        weights.load(tmp_path)


def test_defective_files_give_one_line(tmp_path):
    with pytest.raises(WeightsError, match="holds neither"):
        weights.load(tmp_path)
    with pytest.raises(WeightsError, match="missing, truncated or unreadable"):
        weights.load(tmp_path / "none.safetensors")
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000)}, file)
    whole = file.read_bytes()
    for content in (b"", whole[:7], whole[:50], whole[:-100], b"x" * 300):
        file.write_bytes(content)
        with pytest.raises(WeightsError, match=r"model\.safetensors: missing, truncated or unreadable") as caught:
            weights.load(tmp_path)
        one_line(caught)


def test_a_pair_is_loaded(tmp_path):
    pair = load_pair(write_pair(tmp_path / "pair"))
    assert pair.tokenizer is None
    assert pair.drafter.depth == 7
    assert pair.target.embedding.dtype == torch.float32
    (tmp_path / "half" / "target").mkdir(parents=True)
    with pytest.raises(WeightsError, match="drafter/ is missing"):
        load_pair(tmp_path / "half")
