"""What lies beside config.json: generation_config.json, tokenizer_config.json; and a language model inside another."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.toy.checkpoints import TARGET, target_tensors, write_pair
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Raw

from treeverify.errors import ConfigError, WeightsError
from treeverify.models.config import TargetConfig
from treeverify.models.pair import load_pair
from treeverify.models.target import Target
from treeverify.models.tokenizer import Tokenizer

WORDS = ["<s>", "</s>", "a", "b", "<|bos|>"]


def written(folder, name, values):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))
    return folder


def tokenizer(folder, *, template=None):
    raw = Raw(models.BPE(vocab={word: index for index, word in enumerate(WORDS)}, merges=[]))
    raw.add_special_tokens([AddedToken(word, special=True) for word in WORDS if word.startswith("<")])
    if template:
        raw.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    raw.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    ("own", "generation", "wanted"),
    [
        (None, 7, (7,)),
        (None, [7, 8], (7, 8)),
        (1, [7, 8], (1, 7, 8)),
        ([1, 7], [7, 8], (1, 7, 8)),
        (1, None, (1,)),
        (1, [], (1,)),
        (None, None, ()),
    ],
)
def test_end_of_text_ids_are_those_of_both_files(tmp_path, own, generation, wanted):
    written(tmp_path, "config.json", TARGET | {"eos_token_id": own})
    written(tmp_path, "generation_config.json", {"eos_token_id": generation, "temperature": 0.6, "do_sample": True})
    assert TargetConfig.load(tmp_path).eos_token_ids == wanted
    assert TargetConfig.load(tmp_path / "config.json").eos_token_ids == wanted


@pytest.mark.parametrize("bad", [2048, -1, "7", 7.0, True, {"a": 1}, [[7]], [7, None], ["7"]], ids=repr)
def test_a_bad_end_of_text_id_is_refused_by_the_files_name(tmp_path, bad):
    written(tmp_path, "config.json", TARGET)
    written(tmp_path, "generation_config.json", {"eos_token_id": bad})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id") as caught:
        TargetConfig.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "begins_with"),
    [
        (None, 4),  # no file: the model's config.json decides
        ({}, 4),
        ({"add_bos_token": False}, None),
        ({"add_bos_token": False, "bos_token": "<s>"}, None),
        ({"add_bos_token": False, "bos_token": "<absent>"}, None),
        ({"add_bos_token": True}, 4),
        ({"add_bos_token": True, "bos_token": "<s>"}, 0),
        ({"add_bos_token": True, "bos_token": {"content": "<s>", "__type": "AddedToken"}}, 0),
        ({"add_bos_token": True, "bos_token": None}, 4),
        ({"add_bos_token": None, "tokenizer_class": "LlamaTokenizerFast"}, 4),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, None),
        ({"tokenizer_class": "Qwen2Tokenizer", "bos_token": "<s>"}, None),
    ],
)
def test_add_bos_token_is_obeyed(tmp_path, settings, begins_with):
    file = tokenizer(tmp_path)
    if settings is not None:
        written(tmp_path, "tokenizer_config.json", settings)
    assert Tokenizer.load(file, 4).encode("ab") == ([2, 3] if begins_with is None else [begins_with, 2, 3])


def test_without_the_flag_the_tokenizers_template_says_whether_texts_begin_with_the_token(tmp_path):
    written(tmp_path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"})
    for template, wanted in (("<s> $A", [0, 2]), ("<s> $A </s>", [0, 2]), ("$A </s>", [2]), ("$A", [2])):
        assert Tokenizer.load(tokenizer(tmp_path, template=template), 4).encode("a") == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "expected a JSON object"),
        ({"add_bos_token": "no"}, "add_bos_token: .*got 'no'"),
        ({"add_bos_token": 0}, "add_bos_token: .*got 0"),
        ({"add_bos_token": True, "bos_token": 3}, "bos_token: .*got 3"),
        ({"add_bos_token": True, "bos_token": "<absent>"}, "bos_token: expected a token of .*got '<absent>'"),
        ({"eos_token": ["</s>"]}, "eos_token: .*got"),
    ],
)
def test_bad_tokenizer_settings(tmp_path, settings, message):
    written(tmp_path, "tokenizer_config.json", settings)
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: {message}") as caught:
        Tokenizer.load(tokenizer(tmp_path), 4)
    assert "\n" not in str(caught.value)


def test_add_bos_token_without_any_such_token_is_refused(tmp_path):
    written(tmp_path, "tokenizer_config.json", {"add_bos_token": True})
    with pytest.raises(ConfigError, match="bos_token: expected a token"):
        Tokenizer.load(tokenizer(tmp_path))


def test_a_pair_obeys_its_settings_wherever_the_tokenizer_lies(tmp_path):
    root = write_pair(tmp_path / "pair")
    tokenizer(root)
    assert load_pair(root).tokenizer.encode("a") == [0, 2]
    settings = {"add_bos_token": False, "eos_token": {"content": "<|bos|>"}}
    for folder in (root / "target", root):
        written(folder, "tokenizer_config.json", settings)
        pair = load_pair(root)
        assert pair.tokenizer.encode("a") == [2]
        assert pair.target.eos_token_ids == (1, 4)
        (folder / "tokenizer_config.json").unlink()
    (root / "tokenizer.json").rename(root / "target" / "tokenizer.json")
    written(root / "target", "tokenizer_config.json", settings | {"eos_token": "<absent>"})
    pair = load_pair(root)
    assert pair.tokenizer.encode("a") == [2]
    assert pair.target.eos_token_ids == (1,)


@pytest.mark.parametrize("prefix", ["language_model.{}", "model.language_model.{}"])
def test_a_language_model_inside_a_model_of_images_loads(tmp_path, prefix):
    root = write_pair(tmp_path / "pair")
    plain = load_pair(root).target
    file = root / "target" / "model.safetensors"
    inner = prefix.format("").startswith("model.")
    names = {
        n: prefix.format(n.removeprefix("model.")) if inner and n != "lm_head.weight" else n for n in load_file(file)
    }
    if not inner:
        names = {name: prefix.format(name) for name in names}
    tensors = {names[name]: tensor for name, tensor in load_file(file).items()}
    save_file(
        tensors
        | {"vision_tower.encoder.blocks.0.norm0.bias": torch.zeros(3), "mm_projector.proj.0.bias": torch.ones(2)},
        file,
    )
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "vision_config": {"hidden_size": 64},
        "eos_token_id": 5,
    }
    text = {name: value for name, value in TARGET.items() if name != "eos_token_id"}
    written(root / "target", "config.json", outer | {"text_config": text})
    target = load_pair(root).target
    assert torch.equal(target.embedding, plain.embedding)
    assert torch.equal(target.head, plain.head)
    assert target.eos_token_ids == (5,)


def test_one_tensor_under_two_names_is_refused():
    config, tensors = target_tensors(num_hidden_layers=1)
    both = tensors | {"language_model.model.norm.weight": torch.ones(192)}
    with pytest.raises(
        WeightsError, match=r"language_model\.model\.norm\.weight: the checkpoint holds model\.norm\.weight too"
    ):
        Target(config, both)
