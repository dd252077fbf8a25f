"""``tokenizer_config.json``: whether a text begins with the begin-of-text token, and what ends one; as in SGLang."""

from __future__ import annotations

from pathlib import Path

from pydantic import field_validator
from tokenizers import Tokenizer

from treeverify.errors import ConfigError
from treeverify.models.config import HubFile, validated
from treeverify.models.files import json_object

_BEGINS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
"""Classes (and their fast forms) of transformers that begin a text with the token unless they are told not to."""


class SpecialTokens(HubFile):
    """The fields of ``tokenizer_config.json`` that are used; a token is its text, or an object with ``content``."""

    source: Path
    add_bos_token: bool | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    tokenizer_class: str | None = None

    @field_validator("bos_token", "eos_token", mode="before")
    @classmethod
    def _content(cls, value: object) -> object:
        return value.get("content", value) if isinstance(value, dict) else value

    @classmethod
    def load(cls, path: Path) -> SpecialTokens:
        """Read ``path``; ConfigError, one line."""
        return validated(cls, json_object(path) | {"source": path}, path)

    def begin(self, tokenizer: Tokenizer, model: int | None) -> int | None:
        """The id that every text begins with, or None. ``model`` is the id that the model's config.json names.

        ConfigError when texts shall begin with a token that ``tokenizer`` does not have.
        """
        index = model if self.bos_token is None else tokenizer.token_to_id(self.bos_token)
        if not self._begins(tokenizer, index):
            return None
        if index is None and (self.add_bos_token or self.bos_token is not None):
            raise ConfigError(f"{self.source}: bos_token: expected a token of tokenizer.json, got {self.bos_token!r}")
        return index

    def end(self, tokenizer: Tokenizer) -> int | None:
        """The id of the token said to end a text; None if there is none, or the tokenizer cannot make it."""
        return None if self.eos_token is None else tokenizer.token_to_id(self.eos_token)

    def _begins(self, tokenizer: Tokenizer, index: int | None) -> bool:
        if self.add_bos_token is not None:
            return self.add_bos_token
        if self.tokenizer_class is None or self.tokenizer_class.removesuffix("Fast") in _BEGINS:
            return True
        return index is not None and index in tokenizer.encode("", add_special_tokens=True).ids[:1]
