from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, pre_tokenizers, trainers

from treeverify.errors import WeightsError
from treeverify.models.tokenizer import StreamDecoder, Tokenizer


def trained() -> Raw:
    raw = Raw(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|bos|>", "<|eos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["def f(x):\n    return x + 1\n" * 5], trainer)
    return raw


TOKENIZER = Tokenizer(trained(), bos=0)


@settings(max_examples=60)
@given(st.text())
@example("a<|eos|>b<|bos|>")
def test_text_survives(text):
    ids = TOKENIZER.encode(text)
    assert ids[0] == 0
    assert TOKENIZER.decode(ids) == text


@settings(max_examples=100)
@given(st.lists(st.integers(0, 299), max_size=40), st.integers(1, 5))
def test_a_stream_tells_what_decoding_at_once_would(ids, step):
    decoder = StreamDecoder(TOKENIZER)
    pieces = [decoder.feed(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(pieces) + decoder.flush() == TOKENIZER.decode(ids)


def test_a_stream_holds_back_half_a_character():
    decoder = StreamDecoder(TOKENIZER)
    ids = TOKENIZER.encode("aé")[1:]
    assert [decoder.feed([token]) for token in ids] == ["a", "", "é"]


def test_tokens_can_be_named():
    assert TOKENIZER.token(1) == "<|eos|>"
    assert TOKENIZER.token(TOKENIZER.encode("(")[1]) == "("
    assert TOKENIZER.token(5000) == "<5000>"
    assert 258 <= TOKENIZER.vocab_size <= 300


def test_a_file_is_loaded_or_refused(tmp_path):
    file = tmp_path / "tokenizer.json"
    with pytest.raises(WeightsError, match="cannot be read"):
        Tokenizer.load(file)
    file.write_text("{}")
    with pytest.raises(WeightsError, match="not a tokenizer"):
        Tokenizer.load(file)
    trained().save(str(file))
    assert Tokenizer.load(file).encode("x") == TOKENIZER.encode("x")[1:]
