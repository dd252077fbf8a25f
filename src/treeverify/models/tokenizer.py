"""The tokenizer of a checkpoint folder (``tokenizer.json``), with incremental decoding for streams."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from treeverify.errors import WeightsError
from treeverify.models.special import SpecialTokens

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Text to ids and back. Text never becomes a special token; ``bos`` alone is added on the way in, if given."""

    def __init__(self, tokenizer: _Tokenizer, bos: int | None = None, eos: int | None = None) -> None:
        """``bos``: the id put in front of every encoded text, or None. ``eos``: the id said to end one, or None."""
        self._tokenizer, self._bos, self.eos = tokenizer, bos, eos
        self._tokenizer.encode_special_tokens = True  # a prompt that spells one is text, not the token
        self._tokenizer.no_truncation()  # what a file was saved with is for training, as transformers has it
        self._tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        self.decodes_in_parts = not _rewrites(json.loads(tokenizer.to_str())["decoder"])

    @classmethod
    def load(cls, path: Path, bos: int | None = None, settings: Path | None = None) -> Tokenizer:
        """Read a ``tokenizer.json``; WeightsError when it is missing or not one.

        ``bos`` is the model's begin-of-text id. ``settings``, a ``tokenizer_config.json`` (by default the one beside
        ``path``, if there is one), says whether texts begin with it; ConfigError for values that cannot be used.
        """
        try:
            raw = _Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(f"{path}: cannot be read: {error}") from None
        except Exception as error:  # noqa: BLE001  (tokenizers raises bare Exception for a malformed file)
            raise WeightsError(f"{path}: not a tokenizer: {error}") from None
        settings = settings or path.with_name("tokenizer_config.json")
        if not settings.exists():
            return cls(raw, bos)
        special = SpecialTokens.load(settings)
        return cls(raw, special.begin(raw, bos), special.end(raw))

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
        """One token as text inside a text, for drawings: its bytes decoded, or its name for a special or unknown id."""
        within = self.decode([index, index])[len(self.decode([index])) :]  # a first token may lose its space
        return within or str(self._tokenizer.id_to_token(index) or f"<{index}>")

    def settled(self, ids: Sequence[int]) -> int:
        """How many of ``ids`` have text that those after them cannot change, as far as byte tokens go.

        A run of byte tokens (``<0x41>``) is text or U+FFFD as a whole, so it is open until another token follows.
        """
        count = len(ids)
        for place in range(len(ids) - 1, -1, -1):
            name = self._tokenizer.id_to_token(ids[place])
            if name is not None and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
                count = place
            elif name is not None and ids[place] not in self._special:
                break
        return count


class StreamDecoder:
    """Turns ids that arrive a few at a time into text pieces whose concatenation is ``decode`` of them all.

    Ids are decoded behind the last token that has text of its own, since the first of a text may lose its space.
    (``tokenizers.decoders.DecodeStream`` raises where bytes turn out not to be UTF-8, and cannot be flushed.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with no ids."""
        self._tokenizer = tokenizer
        self._window: list[int] = []  # a token that was told, and all after it
        self._told = 0  # characters of the window's text that were told

    def feed(self, ids: Iterable[int]) -> str:
        """Add ids; returns the new text, holding back what later ids can change: half a character, a run of bytes."""
        self._window.extend(ids)
        if not self._window or not self._tokenizer.decodes_in_parts:
            return ""
        settled = self._tokenizer.settled(self._window)
        text = self._tokenizer.decode(self._window[:settled])
        complete = text.rstrip(UNFINISHED)
        piece = complete[self._told :]
        self._told = max(self._told, len(complete))
        if settled == len(self._window) and complete == text:
            self._shorten()
        return piece

    def flush(self) -> str:
        """The text held back at the end of a stream; the decoder is then empty."""
        text = self._tokenizer.decode(self._window)[self._told :]
        self._window, self._told = [], 0
        return text

    def _shorten(self) -> None:
        """Keep only the last token, if its text is enough to begin with."""
        last = self._tokenizer.decode(self._window[-1:])
        if last.strip() and not last.endswith(UNFINISHED):
            self._window, self._told = self._window[-1:], len(last)


def _rewrites(decoder: dict[str, Any] | None) -> bool:
    """Whether later ids may change earlier text: ``decoder`` replaces more than one character, or strips the end."""
    if decoder is None:
        return False
    pattern = decoder.get("pattern", {}).get("String", "") if decoder["type"] == "Replace" else " "
    return len(pattern) != 1 or bool(decoder.get("stop")) or any(_rewrites(d) for d in decoder.get("decoders", []))
