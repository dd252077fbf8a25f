"""Model configurations, read from Hugging Face ``config.json`` files; every refusal is one line, a ConfigError.

Field names are Hugging Face's (``DeepseekV3ForCausalLM``; SGLang's ``DFlashDraftModel`` for the drafter), so that a
checkpoint folder needs nothing beside its own ``config.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from treeverify.errors import ConfigError

PositiveInt = Field(gt=0)
C = TypeVar("C", bound="_HubConfig")


class _HubConfig(BaseModel):
    """What both configurations share: unknown keys are ignored, values are frozen once read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    architectures: tuple[str, ...] = ()
    vocab_size: int = PositiveInt
    hidden_size: int = PositiveInt
    intermediate_size: int = PositiveInt
    num_hidden_layers: int = PositiveInt
    num_attention_heads: int = PositiveInt
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = PositiveInt
    attention_bias: bool = False

    @model_validator(mode="before")
    @classmethod
    def _rope_parameters(cls, data: Any) -> Any:
        """Accept ``rope_parameters`` (transformers >= 5) beside the older ``rope_theta`` + ``rope_scaling``."""
        if isinstance(data, dict) and isinstance(rope := data.get("rope_parameters"), dict):
            data = {**data, "rope_theta": rope.get("rope_theta", data.get("rope_theta", 10000.0))}
            if rope.get("rope_type", "default") != "default":
                data["rope_scaling"] = rope
        return data

    @model_validator(mode="after")
    def _computed_here(self) -> Self:
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act: expected 'silu', got {self.hidden_act!r}")
        if self.attention_bias:
            raise ValueError("attention_bias: expected false, got true")
        return self


class TargetConfig(_HubConfig):
    """An MLA target (``DeepseekV3ForCausalLM``), as its ``config.json`` describes it."""

    tie_word_embeddings: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = PositiveInt
    qk_nope_head_dim: int = PositiveInt
    qk_rope_head_dim: int = Field(gt=0, multiple_of=2)
    v_head_dim: int = PositiveInt
    rope_interleave: bool = True
    moe_intermediate_size: int = PositiveInt
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int = PositiveInt
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

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
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` routes to experts (Hugging Face's rule, with ``moe_layer_freq``)."""
        return (
            self.n_routed_experts is not None
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    @classmethod
    def load(cls, path: Path) -> TargetConfig:
        """Read ``path`` (a folder or a ``config.json``); ConfigError when it is not an MLA model's.

        A nested ``text_config`` (Kimi K2.x wraps its language model so) is used in place of the outer object.
        """
        data = _read_json(path)
        outer = data.get("architectures")
        if isinstance(data.get("text_config"), dict):
            data = data["text_config"]
        if not isinstance(data.get("kv_lora_rank"), int):
            architectures = ", ".join(data.get("architectures") or outer or ["?"])
            raise ConfigError(f"{path}: not an MLA model: architectures = {architectures}, kv_lora_rank is missing")
        return _validated(cls, data, path)


class DrafterConfig(_HubConfig):
    """A DFlash drafter (``DFlashDraftModel``), as its ``config.json`` describes it."""

    num_key_value_heads: int = PositiveInt
    head_dim: int = Field(gt=0, multiple_of=2)
    block_size: int = Field(gt=1)
    mask_token_id: int = Field(ge=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _dflash(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = {**data, **(data.get("dflash_config") or {})}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: expected a multiple of num_key_value_heads = {self.num_key_value_heads}, "
                f"got {self.num_attention_heads}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id: expected < vocab_size = {self.vocab_size}, got {self.mask_token_id}")
        if self.rope_scaling is not None:
            raise ValueError("rope_scaling: expected null for a drafter")
        return self

    @property
    def depth(self) -> int:
        """Tokens drafted in one block: its positions after the root."""
        return self.block_size - 1

    @classmethod
    def load(cls, path: Path) -> DrafterConfig:
        """Read ``path`` (a folder or a ``config.json``); ConfigError when it is not a DFlash drafter's."""
        data = _read_json(path)
        if not isinstance(data.get("dflash_config"), dict) and "target_layer_ids" not in data:
            architectures = ", ".join(data.get("architectures") or ["?"])
            raise ConfigError(
                f"{path}: not a DFlash drafter: architectures = {architectures}, dflash_config is missing"
            )
        return _validated(cls, data, path)

    def check_against(self, target: TargetConfig) -> None:
        """ConfigError unless this drafter can draft for ``target``: same width and vocabulary, layers that exist."""
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self, name), getattr(target, name)
            if ours != theirs:
                raise ConfigError(f"drafter: {name}: expected the target's {theirs}, got {ours}")
        if bad := [i for i in self.target_layer_ids if not 0 <= i < target.num_hidden_layers]:
            raise ConfigError(f"drafter: target_layer_ids: expected 0..{target.num_hidden_layers - 1}, got {bad}")


def _read_json(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return data


def _validated(cls: type[C], data: dict[str, Any], path: Path) -> C:
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        first, *rest = error.errors(include_url=False)
        where = ".".join(str(part) for part in first["loc"])
        more = f" (and {len(rest)} more)" if rest else ""
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {where + ': ' if where else ''}{message}{more}") from None
