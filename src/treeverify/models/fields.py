"""Fields of a ``config.json`` that change what a model computes: each is computed, or refused by its name.

What a configuration class declares is computed. Of the rest, ``IRRELEVANT`` never reaches a forward, and ``EXPECTED``
is computed at the values given there only. A field that neither names is refused if its name speaks of a forward's
arithmetic (``_ARITHMETIC``) and its value is not one of ``OFF``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from treeverify.errors import ConfigError

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values that switch a feature off."""

IRRELEVANT = frozenset(
    {
        # what a file says of itself; training: losses, dropout, first values
        *(
            "_commit_hash",
            "_experts_implementation",
            "_attn_implementation",
            "_attn_implementation_autoset",
            "_attn_implementation_internal",
        ),
        *("attn_implementation", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop"),
        *("embedding_initializer_range", "hidden_dropout_prob", "initializer_range", "resid_pdrop"),
        *("output_attentions", "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef"),
        *("router_jitter_noise",),
        # names of ids, and defaults of sampling: a request states its own
        *("encoder_no_repeat_ngram_size", "ignore_index", "no_repeat_ngram_size", "num_beam_groups"),
        *("exponential_decay_length_penalty", "temperature", "top_k"),
        # what other fields say too, or what acts only beside a field that is refused
        *("max_window_layers", "num_key_value_heads", "original_max_position_embeddings"),
        *("sliding_window_pattern", "tie_word_embeddings"),
        # how a server runs the model
        "chunk_size_feed_forward",
    }
)

_ONE, _ACTIVATION = (None, 1), ("silu",)
EXPECTED: dict[str, tuple[Any, ...]] = {
    "activation_function": _ACTIVATION,
    "attention_value_scale": _ONE,
    "embedding_multiplier": _ONE,
    "hidden_act": _ACTIVATION,
    "hidden_activation": _ACTIVATION,
    "layer_types": (None, "full_attention"),
    "logit_scale": _ONE,
    "logits_scaling": _ONE,
    "norm_type": (None, "rmsnorm", "rms_norm"),
    "output_multiplier": _ONE,
    "partial_rotary_factor": _ONE,
    "position_embedding_type": (None, "rope"),
    "quantization_config": OFF,
    "residual_multiplier": _ONE,
    "rope_scaling": OFF,
    "rotary_pct": _ONE,
    "scale_emb": _ONE,
    "sliding_window": OFF,
    "use_sliding_window": OFF,
}
"""The values at which a field is what both forwards compute; of a list, the values of its items."""

TARGET = EXPECTED | {
    "architectures": (
        None,
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
    ),
    "is_causal": (None, True),
    "n_group": _ONE,
    "scoring_func": (None, "sigmoid"),
    "topk_group": _ONE,
    "topk_method": (None, "noaux_tc"),
    "use_mla": (None, True),
}
DRAFTER = EXPECTED | {
    "architectures": (None, "DFlashDraftModel"),
    "has_embed_tokens": OFF,
    "is_causal": (None, False),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "sample_from_anchor": (None, True),
}

_ARITHMETIC = re.compile(
    "act_fn|activation|alibi|altup|anchor|att(n|ention)|bias|bidirect|block_(config|type)|cap|causal|centered|chunk|"
    "clamp|clip|compress|conv|cross|cycle|decay|depth|dim_model|domino|draft_vocab|emb(_|ed)|encoder|engram|expan|"
    "expert|ffn|freq|gat(e|ing)|glu|group|gru|hash|hc_|hidden_act|hybrid|hyper|index|interleave|interval|kda|kernel|"
    "laurel|layers?_(block|group|pattern|period|types?)|lightning|limit|linear|(^|_)ln(_|$)|logit|loop|lora|low_rank|"
    "mamba|mem_|mhc|mixer|mla|mlp|moe|multiplier|mup|n_?gram|neox|nope|norm|offset|parallel_block|pattern|per_layer|"
    "ple_|pos_|position|prefix_lm|projector|prun|quant|rank|recurren|residual|rotary|rope|rout(e|er|ing)|scal|score|"
    "selector|share|sharing|shift|sink|sliding|soft_?max|sparse|ssm|swa|temperature|top_?k|window|yarn"
)


def check(
    fields: Mapping[str, Any], expected: Mapping[str, tuple[Any, ...]], declared: Collection[str], source: object
) -> None:
    """ConfigError for the first of ``fields`` (name to value) at a value that the forward does not compute.

    ``expected`` is ``TARGET`` or ``DRAFTER``; ``declared`` are the names that the configuration class reads itself.
    """
    for name, value in fields.items():
        known = name in declared or name in IRRELEVANT or not _ARITHMETIC.search(name)
        if name not in expected and known:
            continue
        accepted = expected.get(name, OFF)
        if name == "sliding_window" and _windows_are_off(fields):
            continue
        items = value if name in ("architectures", "layer_types") and isinstance(value, list | tuple) else [value]
        if not all(any(_equal(item, one) for one in accepted) for item in items):
            wanted = "null" if accepted is OFF else " or ".join(repr(one) for one in accepted if one is not None)
            label = name if name.isidentifier() else ascii(name)
            raise ConfigError(f"{source}: {label}: expected {wanted}, got {shown(value)}, which is not computed here")


def _windows_are_off(fields: Mapping[str, Any]) -> bool:
    """Whether a window's size means nothing: it is switched off, or no layer uses it."""
    types = fields.get("layer_types")
    return fields.get("use_sliding_window") is False or (
        isinstance(types, list | tuple) and bool(types) and all(one == "full_attention" for one in types)
    )


def _equal(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def scaled(rope: Mapping[str, Any]) -> bool:
    """Whether ``rope`` (``rope_scaling``, ``rope_parameters``) asks for more than its theta: another kind, a factor."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    neutral = {"rope_theta": None, "rope_type": None, "type": None, "factor": 1, "partial_rotary_factor": 1}
    return kind != "default" or any(
        value not in OFF and (key not in neutral or neutral[key] not in (None, value)) for key, value in rope.items()
    )


def shown(value: Any) -> str:
    """A value for a message: one line, cut at 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
