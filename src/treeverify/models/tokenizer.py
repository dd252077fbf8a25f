"""The byte-level BPE tokenizer of a checkpoint folder (``tokenizer.json``), with incremental decoding for streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from treeverify.errors import WeightsError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Text to ids and back. Text never becomes a special token; ``bos`` alone is added on the way in, if given."""

    def __init__(self, tokenizer: _Tokenizer, bos: int | None = None) -> None:
        """``bos``: the id put in front of every encoded text, or None."""
        self._tokenizer, self._bos = tokenizer, bos
        self._tokenizer.encode_special_tokens = True  # a prompt that spells one is text, not the token

    @classmethod
    def load(cls, path: Path, bos: int | None = None) -> Tokenizer:
        """Read a ``tokenizer.json``; WeightsError when it is missing or not one."""
        try:
            return cls(_Tokenizer.from_str(path.read_text(encoding="utf-8")), bos)
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(f"{path}: cannot be read: {error}") from None
        except Exception as error:  # noqa: BLE001  (tokenizers raises bare Exception for a malformed file)
            raise WeightsError(f"{path}: not a tokenizer: {error}") from None

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, special ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, after the begin-of-text id if there is one."""
        ids = list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)  # without the GIL
        return ids if self._bos is None else [self._bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, index: int) -> str:
        """One token as text, for drawings: its bytes decoded, or its name for a special or unknown id."""
        return self.decode([index]) or str(self._tokenizer.id_to_token(index) or f"<{index}>")


class StreamDecoder:
    """Turns ids that arrive a few at a time into text pieces whose concatenation is ``decode`` of them all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with no ids."""
        self._tokenizer = tokenizer
        self._pending: list[int] = []  # ids since the last complete character, some of whose text may be told
        self._told = 0

    def feed(self, ids: Iterable[int]) -> str:
        """Add ids; returns the new text, holding back a character whose bytes are not all there yet."""
        self._pending.extend(ids)
        text = self._tokenizer.decode(self._pending)
        complete = text.rstrip(UNFINISHED)
        piece = complete[self._told :]
        if complete == text:
            self._pending, self._told = [], 0
        else:
            self._told = max(self._told, len(complete))
        return piece

    def flush(self) -> str:
        """The text held back at the end of a stream; the decoder is then empty."""
        text = self._tokenizer.decode(self._pending)[self._told :]
        self._pending, self._told = [], 0
        return text
