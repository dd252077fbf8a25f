from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Raw

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


PIECES = [
    "<s>", "<unk>", "▁", "▁▁", "▁Hello", "▁world", "world", "##ing", "!", "<0x0A>", "<0xE4>", "<0xB8>", "<0xAD>",
    "<0xFF>", "<0x41>", "x", "low", "er</w>", "|", "<pad>", "\N{REPLACEMENT CHARACTER}", " .", "ab", "b",
    "a", " a ", "H", "HH",
]  # fmt: skip
SPACES = decoders.Replace("▁", " ")
DECODERS = {
    "Llama": decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "Gemma": decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()]),
    "two spaces": decoders.Sequence([SPACES, decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "Metaspace": decoders.Metaspace(),
    "Metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "bytes, Metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "WordPiece": decoders.WordPiece(),
    "BPE": decoders.BPEDecoder(),
    "CTC": decoders.CTC(pad_token="<pad>"),
    "two at once": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "Q")]),
    "bytes": decoders.ByteLevel(),
    "none": None,
}
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


def decoder_tokenizer(decoder) -> Tokenizer:
    raw = Raw(models.BPE(vocab={piece: index for index, piece in enumerate(PIECES)}, merges=[]))
    if decoder is not None:
        raw.decoder = decoder
    raw.add_special_tokens(["<s>"])
    raw.add_tokens([AddedToken("é", special=False)])
    return Tokenizer(raw)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150)
@given(st.lists(st.integers(0, len(PIECES) + 1), max_size=12), st.integers(1, 3))
@example([4, 5, 8], 1)
@example([4, 0, 5], 1)
@example([0, 4, 0, 0, 5], 2)
@example([4, 10, 11, 12, 5], 1)
@example([14, 13, 15], 1)
@example([10, 0, 11, 12], 1)
@example([2, 2, 4], 1)
def test_a_stream_tells_what_decoding_at_once_would_with_every_decoder(name, ids, step):
    tokenizer = decoder_tokenizer(DECODERS[name])
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.feed(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "Metaspace", "WordPiece", "BPE", "none"])
def test_a_word_is_told_as_soon_as_it_is_there(name):
    tokenizer = decoder_tokenizer(DECODERS[name])
    decoder = StreamDecoder(tokenizer)
    ids = [4, 5, 4, 0, 5, 8]
    pieces = [decoder.feed([token]) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all(pieces[i] for i in (0, 1, 2, 4, 5))
    assert decoder.flush() == ""


def test_a_byte_that_turns_out_not_to_be_text_was_not_told():
    decoder = StreamDecoder(decoder_tokenizer(DECODERS["Llama"]))
    assert [decoder.feed([token]) for token in (14, 13, 15)] == ["", "", "\N{REPLACEMENT CHARACTER}" * 2 + "x"]


def test_one_token_keeps_its_space_in_a_drawing():
    for name in ("Llama", "Metaspace"):
        tokenizer = decoder_tokenizer(DECODERS[name])
        assert (tokenizer.token(5), tokenizer.token(15), tokenizer.token(0)) == (" world", "x", "<s>")


def test_a_files_truncation_and_padding_do_not_apply_to_prompts(tmp_path):
    raw, text = trained(), "def f(x): return x " * 20
    whole = raw.encode(text).ids
    raw.enable_truncation(max_length=16)
    raw.enable_padding(length=4096, pad_id=1)
    raw.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (Tokenizer.load(tmp_path / "tokenizer.json", 0), Tokenizer(raw, 0)):
        assert tokenizer.encode(text) == [0, *whole]
        assert tokenizer.encode("") == [0]


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
