"""Numbers, lists, objects and files of the wrong kind, in every place: one typed line, never another exception."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from tests.toy.checkpoints import DRAFTER, TARGET, drafter_tensors, target_tensors

from treeverify.errors import ConfigError, TreeverifyError, WeightsError
from treeverify.models import weights
from treeverify.models.config import DrafterConfig, TargetConfig
from treeverify.models.drafter import Drafter
from treeverify.models.target import Target

NUMBERS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
TARGET_NUMBERS = NUMBERS | {"moe_layer_freq": 1, "routed_scaling_factor": 1.0, "rope_interleave": True}
FULL_TARGET = TARGET | TARGET_NUMBERS | {"tie_word_embeddings": False, "text_config": None, "rope_parameters": None}
FULL_DRAFTER = DRAFTER | NUMBERS | {"rope_scaling": None}
NEVER = ("4", "", True, [[1]], {"a": 1}, math.nan, math.inf, -1, 10**30)
"""No integer or float field takes any of these; True is a bool field's, and the only one."""
BOOLS = ("norm_topk_prob", "rope_interleave", "tie_word_embeddings")
OTHERS = ("architectures", "text_config", "rope_parameters", "rope_scaling", "dflash_config")


def one_line(caught) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(folder, values):
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


@pytest.mark.parametrize("value", NEVER, ids=repr)
@pytest.mark.parametrize("name", [name for name in FULL_TARGET if name not in (*BOOLS, *OTHERS)])
def test_every_number_of_a_target_is_a_number_in_its_range(tmp_path, name, value):
    with pytest.raises(ConfigError, match=rf"{name}(\.\d)?: .*got ") as caught:
        TargetConfig.load(write(tmp_path, FULL_TARGET | {name: value}))
    one_line(caught)


@pytest.mark.parametrize("value", NEVER, ids=repr)
@pytest.mark.parametrize("name", [n for n in {**FULL_DRAFTER, **DRAFTER["dflash_config"]} if n not in OTHERS])
def test_every_number_of_a_drafter_is_a_number_in_its_range(tmp_path, name, value):
    values = FULL_DRAFTER | {"dflash_config": {k: v for k, v in DRAFTER["dflash_config"].items() if k != "block_size"}}
    place = values["dflash_config"] if name in values["dflash_config"] else values
    place[name] = value
    with pytest.raises(ConfigError, match=rf"{name}(\.\d)?: .*got ") as caught:
        DrafterConfig.load(write(tmp_path, values))
    one_line(caught)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": 0}, "moe_layer_freq: .* greater than 0, got 0"),
        ({"moe_layer_freq": [0, 1, 1, 1]}, r"moe_layer_freq: .*integer, got \[0, 1, 1, 1\]"),
        ({"n_routed_experts": 0}, "n_routed_experts: .*got 0"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok: expected at most n_routed_experts = 16, got 17"),
        ({"n_shared_experts": -1}, "n_shared_experts"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace"),
        ({"bos_token_id": 2048}, "bos_token_id: expected an id below vocab_size = 2048, got 2048"),
        ({"eos_token_id": [1, 2048]}, "eos_token_id: expected an id below vocab_size = 2048, got 2048"),
        ({"eos_token_id": [1, None]}, r"eos_token_id\.1: .*got None"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: .*1024"),
        ({"max_position_embeddings": 2**24 + 1}, "max_position_embeddings"),
        ({"rope_theta": 1e-300}, "rope_theta"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"rope_parameters": [1]}, r"rope_parameters: expected an object, got \[1\]"),
        ({"rope_scaling": "yarn"}, "rope_scaling: expected an object, got 'yarn'"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta: .*got 'big'"),
        ({"text_config": [1]}, r"text_config: expected an object, got \[1\]"),
        ({"architectures": [5]}, r"architectures\.0: .*got 5"),
        ({"architectures": 5, "kv_lora_rank": None}, "architectures = 5, kv_lora_rank is missing"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank: .*integer, got '512'"),
    ],
)
def test_numbers_that_do_not_go_together(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        TargetConfig.load(write(tmp_path, FULL_TARGET | changes))
    assert str(tmp_path) in one_line(caught)


@pytest.mark.parametrize("value", [[1], "x", 3, True], ids=repr)
def test_dflash_config_is_an_object(tmp_path, value):
    with pytest.raises(ConfigError, match="dflash_config: expected an object, got") as caught:
        DrafterConfig.load(write(tmp_path, DRAFTER | {"dflash_config": value}))
    one_line(caught)


@pytest.mark.parametrize("content", ["", "null", "[]", '"x"', "3", "{", "[" * 100000, "\x00", "1" * 5000], ids=len)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_json_object_is_refused(tmp_path, name, content):
    write(tmp_path, TARGET)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"{name}: (not JSON|expected a JSON object)") as caught:
        TargetConfig.load(tmp_path)
    one_line(caught)


@pytest.mark.parametrize(
    "content",
    [
        "[]", "null", '"x"', "3", "{", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": "x"}',
        '{"weight_map": {"a": 1}}', '{"weight_map": {"a": null}}', '{"weight_map": {"a": ["x"]}}',
        '{"weight_map": {"a": ""}}', '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": "../a.safetensors"}}',
        '{"weight_map": {"a": "/a.safetensors"}}', '{"weight_map": {"a": "none.safetensors"}}', "[" * 100000,
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_an_index_of_the_wrong_shape(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=rf"^{tmp_path}") as caught:
        weights.load(tmp_path)
    one_line(caught)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    for shard in "ab":
        save_file({"t": torch.zeros(2)}, tmp_path / f"{shard}.safetensors")
    index = {"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"b\.safetensors: t: another shard holds it too"):
        weights.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_weight_of_another_dtype_is_refused(dtype):
    config, tensors = target_tensors(num_hidden_layers=1)
    with pytest.raises(WeightsError, match=rf"model\.norm\.weight: expected one of float32, .*, got {dtype}") as caught:
        Target(config, tensors | {"model.norm.weight": torch.zeros(192).to(dtype)})
    one_line(caught)


@pytest.mark.parametrize("shape", [(), (0,), (191,), (192, 1), (1, 192)], ids=str)
def test_a_weight_of_another_shape_is_refused(shape):
    config, tensors = target_tensors(num_hidden_layers=1)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: expected shape \(192,\), got \(") as caught:
        Target(config, tensors | {"model.norm.weight": torch.zeros(shape)})
    one_line(caught)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.sinks", "model.layers.0.mlp.gate_proj.bias",
        "model.layers.0.self_attn.indexer.wq_b.weight", "model.layers.0.self_attn.o_proj.weight_scale_inv",
        "model.layers.1.self_attn.q_proj.weight", "model.norm.bias", "lm_head.bias",
    ],
)  # fmt: skip
def test_a_targets_tensor_that_nothing_reads_is_refused(name):
    config, tensors = target_tensors(num_hidden_layers=1)
    with pytest.raises(WeightsError, match=rf"{name}: the model of this config\.json has no such tensor"):
        Target(config, tensors | {name: torch.ones(1)})


def test_tensors_that_no_forward_needs_are_left_alone():
    config, tensors = target_tensors(num_hidden_layers=1, tie_word_embeddings=True)
    predicts = "model.layers.1."
    left = ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.blocks.0.bias")
    ahead = (predicts + "eh_proj.weight", predicts + "enorm.weight", predicts + "self_attn.q_proj.weight")
    target = Target(config, tensors | {name: torch.ones(1) for name in (*left, *ahead)})
    drafter, its = drafter_tensors(dflash_config=DRAFTER["dflash_config"] | {"target_layer_ids": [0]})
    Drafter(drafter, its | {"embed_tokens.weight": torch.ones(1), "lm_head.weight": torch.ones(1)}, target)
    for name in ("layers.0.self_attn.q_proj.bias", "layers.2.mlp.up_proj.weight", "fc.bias", "prefix_gru.weight_ih"):
        with pytest.raises(WeightsError, match=f"{name}: the model of this config"):
            Drafter(drafter, its | {name: torch.ones(1)}, target)


def test_every_refusal_is_the_projects_own(tmp_path):
    """Whatever stands in a field: it loads, or one line of ours says why not."""
    for value in (None, 0, 1, 7, 10**400, 1.5, "x\ny", "\ud83d", [], ["a"], {"rope_type": []}):
        for name in (*FULL_TARGET, "hidden_act", "layer_types", "a\nscale", "\ud83dbias", "model_config", "copy"):
            try:
                TargetConfig.load(write(tmp_path, FULL_TARGET | {name: value}))
            except TreeverifyError as error:
                text = str(error)
                assert "\n" not in text
                assert text.encode()
