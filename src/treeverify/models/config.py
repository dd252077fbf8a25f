"""Model configurations, read from Hugging Face ``config.json`` files; every refusal is one line, a ConfigError.

Field names are Hugging Face's (``DeepseekV3ForCausalLM``; SGLang's ``DFlashDraftModel`` for the drafter), so that a
checkpoint folder needs nothing beside its own ``config.json``. Numbers are numbers, never text or true and false.
``fields`` says which of the other fields a forward may ignore.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from treeverify.errors import ConfigError
from treeverify.models import fields
from treeverify.models.files import json_object


def _as_tuple(value: Any) -> Any:
    """A list as a tuple, and one value as a tuple of it."""
    if value is None:
        return None
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Size = Annotated[int, Field(gt=0, lt=2**31)]
Layers = Annotated[int, Field(gt=0, le=1024)]
Experts = Annotated[int, Field(gt=0, le=4096)]
Count = Annotated[int, Field(ge=0, le=4096)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Context = Annotated[int, Field(gt=0, le=2**24)]  # the positions that float32, and with it rope, can tell apart

Eos = Annotated[tuple[Token, ...] | None, BeforeValidator(_as_tuple)]
Ids = Annotated[tuple[Token, ...], BeforeValidator(_as_tuple)]

C = TypeVar("C", bound="HubFile")


class HubFile(BaseModel):
    """A file of a checkpoint: frozen, typed without conversions; keys that are not declared are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


class _Generation(HubFile):
    """``generation_config.json``; sampling's defaults in it are not used."""

    eos_token_id: Eos = None


class _HubConfig(HubFile):
    """What both configurations share."""

    expected: ClassVar[Mapping[str, tuple[Any, ...]]]

    architectures: Annotated[tuple[str, ...] | None, BeforeValidator(_as_tuple)] = None
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    rms_norm_eps: float = Field(default=1e-6, gt=0, le=1)
    rope_theta: float = Field(default=10000.0, ge=1, le=1e12)
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: Context

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: Any) -> Any:
        """Bring ``dflash_config`` to the top; read ``rope_parameters`` (transformers >= 5) like ``rope_scaling``."""
        data = dict(data)
        inner = {key: value for key, value in _object(data, "dflash_config").items() if value is not None}
        data |= inner
        for name in ("rope_scaling", "rope_parameters"):
            rope = _object(data, name)
            if "rope_theta" in rope:
                data["rope_theta"] = rope["rope_theta"]
            if fields.scaled(rope):
                data["rope_scaling"] = rope
        return data

    def check_computed(self, source: object) -> None:
        """ConfigError unless the forward computes what every field asks for."""
        everything = {**self.__dict__, **(self.model_extra or {})}
        fields.check(everything, self.expected, type(self).model_fields, source)


class TargetConfig(_HubConfig):
    """An MLA target (``DeepseekV3ForCausalLM``), as its ``config.json`` describes it."""

    expected = fields.TARGET

    tie_word_embeddings: bool | None = False
    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Annotated[Size, Field(multiple_of=2)]
    v_head_dim: Size
    rope_interleave: bool = True
    moe_intermediate_size: Size
    n_routed_experts: Experts | None = None
    n_shared_experts: Count | None = None
    num_experts_per_tok: Size
    first_k_dense_replace: Annotated[int, Field(ge=0, lt=2**31)] = 0
    moe_layer_freq: Size = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = Field(default=1.0, gt=0, le=1e6)
    bos_token_id: Token | None = None
    eos_token_id: Eos = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        experts, chosen = self.n_routed_experts, self.num_experts_per_tok
        if experts is not None and chosen > experts:
            raise ValueError(f"num_experts_per_tok: expected at most n_routed_experts = {experts}, got {chosen}")
        if self.bos_token_id is not None:
            self._check_ids("bos_token_id", (self.bos_token_id,))
        self._check_ids("eos_token_id", self.eos_token_ids)
        return self

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        if bad := [token for token in ids if token >= self.vocab_size]:
            raise ValueError(f"{name}: expected an id below vocab_size = {self.vocab_size}, got {bad[0]}")

    @property
    def row(self) -> int:
        """Values in one KV row: the latent and the rotary part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def context(self) -> int:
        """Positions a request may use."""
        return self.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, possibly none."""
        return self.eos_token_id or ()

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` routes to experts (Hugging Face's rule, with ``moe_layer_freq``)."""
        return (
            self.n_routed_experts is not None
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    def with_eos(self, ids: Iterable[int], source: object) -> Self:
        """This configuration with ``ids``, read from ``source``, among those that end a text (ConfigError)."""
        try:
            self._check_ids("eos_token_id", ids)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None
        return self.model_copy(update={"eos_token_id": tuple(dict.fromkeys((*self.eos_token_ids, *ids)))})

    @classmethod
    def load(cls, path: Path) -> TargetConfig:
        """Read ``path`` (a folder or a ``config.json``); ConfigError when it is not an MLA model's.

        The end-of-text ids of a ``generation_config.json`` beside it count too, as in SGLang.
        """
        data = _read(cls, path)
        if data.get("kv_lora_rank") is None:
            raise ConfigError(f"{path}: not an MLA model: {_architectures(data)}, kv_lora_rank is missing")
        config = validated(cls, data, path)
        config.check_computed(path)
        generation = (path if path.is_dir() else path.parent) / "generation_config.json"
        if not generation.exists():
            return config
        return config.with_eos(
            validated(_Generation, json_object(generation), generation).eos_token_id or (), generation
        )


class DrafterConfig(_HubConfig):
    """A DFlash drafter (``DFlashDraftModel``), as its ``config.json`` describes it."""

    expected = fields.DRAFTER

    num_key_value_heads: Size
    head_dim: Annotated[Size, Field(multiple_of=2)]
    block_size: int = Field(gt=1, le=4096)
    mask_token_id: Token
    target_layer_ids: Annotated[Ids, Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: expected a multiple of num_key_value_heads = {self.num_key_value_heads}, "
                f"got {self.num_attention_heads}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id: expected < vocab_size = {self.vocab_size}, got {self.mask_token_id}")
        return self

    @property
    def depth(self) -> int:
        """Tokens drafted in one block: its positions after the root."""
        return self.block_size - 1

    @classmethod
    def load(cls, path: Path) -> DrafterConfig:
        """Read ``path`` (a folder or a ``config.json``); ConfigError when it is not a DFlash drafter's."""
        data = _read(cls, path)
        if data.get("dflash_config") is None and "target_layer_ids" not in data:
            raise ConfigError(f"{path}: not a DFlash drafter: {_architectures(data)}, dflash_config is missing")
        config = validated(cls, data, path)
        config.check_computed(path)
        return config

    def check_against(self, target: TargetConfig) -> None:
        """ConfigError unless this drafter can draft for ``target``: same width and vocabulary, layers that exist."""
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self, name), getattr(target, name)
            if ours != theirs:
                raise ConfigError(f"drafter: {name}: expected the target's {theirs}, got {ours}")
        if bad := [i for i in self.target_layer_ids if i >= target.num_hidden_layers]:
            raise ConfigError(f"drafter: target_layer_ids: expected 0..{target.num_hidden_layers - 1}, got {bad}")


def _object(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Take the object ``name`` out of ``data``: empty if it is not there, ValueError if it is something else."""
    value = data.pop(name, None)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object, got {fields.shown(value)}")
    return value or {}


def _read(cls: type[_HubConfig], path: Path) -> dict[str, Any]:
    """The fields of a language model's ``config.json``.

    A model of text and images (Kimi K2.5) nests them in ``text_config``; what is outside counts where the inner object
    does not say it and it is not about images.
    """
    data = json_object(path / "config.json" if path.is_dir() else path)
    try:
        inner = _object(data, "text_config")
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not inner:
        return data
    shared = {*cls.model_fields, *cls.expected, "dflash_config", "rope_parameters"}
    return {name: value for name, value in data.items() if name in shared} | inner


def _architectures(data: dict[str, Any]) -> str:
    return f"architectures = {fields.shown(data.get('architectures'))}"


def validated(cls: type[C], data: dict[str, Any], path: Path) -> C:
    """Make a ``cls`` of ``data``, read from ``path``; ConfigError, one line, naming the first field at fault."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        first, *rest = error.errors(include_url=False)
        name, *inner = first["loc"] or ("",)
        where = ".".join(str(part) for part in (name, *inner) if part == name or isinstance(part, int))
        more = f" (and {len(rest)} more)" if rest else ""
        message = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] in ("missing", "value_error") else f", got {fields.shown(first['input'])}"
        raise ConfigError(f"{path}: {where + ': ' if where else ''}{message}{got}{more}") from None
