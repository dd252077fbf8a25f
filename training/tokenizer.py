"""The byte-level BPE tokenizer: ids 0 and 1 are the begin and end of a file, the last id is left free for MASK."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.shapes import EOS

SPECIAL = ["<|bos|>", "<|eos|>"]


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train on texts; `vocab` counts MASK, which no text can produce."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.token_to_id(SPECIAL[1]) != EOS:
        raise ValueError("the special tokens must take the first ids")
    return tokenizer


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write tokenizer.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
