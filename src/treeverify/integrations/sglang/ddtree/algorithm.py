"""What a DDTREE server accepts: its arguments, its requests, and the registration of the algorithm.

SGLang calls ``fill`` while it resolves the command line. What it cannot serve is refused there, by name, all of it in
one message. ``width`` = budget + 1 nodes is ``--speculative-num-draft-tokens``; depth comes from the drafter's block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from treeverify.errors import ConfigError
from treeverify.integrations.sglang.ddtree.ladder import ladder_of
from treeverify.ops.tree_build.contract import MAX_BUDGET

NAME = "DDTREE"
DEFAULT_WIDTH = 17
BACKENDS = ("treeverify", "triton")
"""Attention backends whose verify calls read a full tree mask."""
DRAFT_BACKENDS = ("triton", "fa3", "fa4", "flashinfer")
"""Attention backends of the drafter whose calls have as many tokens as its block."""
MAX_RUNNING = 48
"""Running requests if the command line names none, as for DFLASH."""


class _Rule(NamedTuple):
    """A server argument that must have one of some values."""

    field: str
    allowed: tuple[object, ...]
    meaning: str


_RULES = (
    _Rule("pp_size", (1,), "pipeline parallelism"),
    _Rule("enable_dp_attention", (False, None), "attention data parallelism"),
    _Rule("attn_dp_size", (1, None), "attention data parallelism"),
    _Rule("attn_cp_size", (1, None), "context parallelism of attention"),
    _Rule("dcp_size", (1, None), "context parallelism of decoding"),
    _Rule("enable_lora", (False, None), "LoRA"),
    _Rule("lora_paths", (None, [], {}), "LoRA"),
    _Rule("disaggregation_mode", ("null", None), "prefill-decode disaggregation"),
    _Rule("page_size", (1, None), "pages of more than one token"),
    _Rule("enable_mixed_chunk", (False, None), "prefill and decode in one batch"),
    _Rule("enable_two_batch_overlap", (False, None), "two-batch overlap"),
    _Rule("enable_pdmux", (False, None), "PD multiplexing"),
    _Rule("enable_unified_memory", (False, None), "the unified memory pool"),
    _Rule("enable_hierarchical_cache", (False, None), "the hierarchical cache"),
    _Rule("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "quantised KV"),
    _Rule("speculative_draft_sink_size", (None, 0), "DFLASH's window has no sink"),
    _Rule("speculative_adaptive", (False, None), "SGLang's adaptive draft lengths"),
    _Rule("speculative_num_steps", (1, None), "steps of a draft: a DFlash block is drafted in one"),
    _Rule("speculative_eagle_topk", (1, None), "EAGLE's top-k: the budget bounds the branches"),
    _Rule("speculative_accept_threshold_single", (1.0, None), "a lossy threshold"),
    _Rule("speculative_accept_threshold_acc", (1.0, None), "a lossy threshold"),
    _Rule("speculative_use_rejection_sampling", (False, None), "another rule of acceptance"),
    _Rule("speculative_use_block_verification", (False, None), "another rule of acceptance"),
    _Rule("prefill_attention_backend", (*BACKENDS, None), "a backend that was not tried with a tree mask"),
    _Rule("decode_attention_backend", (*BACKENDS, None), "a backend that was not tried with a tree mask"),
    _Rule("attention_backend", BACKENDS, "a backend that was not tried with a tree mask"),
    _Rule(
        "speculative_draft_attention_backend",
        (*DRAFT_BACKENDS, None),
        "a backend that takes the tree's width for the block's",
    ),
)

_SAMPLING = (
    _Rule("json_schema", (None,), "grammar"),
    _Rule("regex", (None,), "grammar"),
    _Rule("ebnf", (None,), "grammar"),
    _Rule("structural_tag", (None,), "grammar"),
    _Rule("logit_bias", (None, {}), "logit bias"),
    _Rule("frequency_penalty", (0, None), "penalties depend on the path that a node is on"),
    _Rule("presence_penalty", (0, None), "penalties depend on the path that a node is on"),
    _Rule("repetition_penalty", (1, None), "penalties depend on the path that a node is on"),
    _Rule("min_new_tokens", (0, None), "it depends on the depth of a node"),
)
_REQUEST = (
    _Rule("return_logprob", (False, None), "log-probabilities"),
    _Rule("return_hidden_states", (False, None), "hidden states"),
    _Rule("return_sampling_mask", (False, None), "sampling masks"),
    _Rule("custom_logit_processor", (None,), "custom logit processors"),
)


def _broken(owner: Any, rules: tuple[_Rule, ...]) -> Iterator[str]:
    """Yield a line for each rule that ``owner`` breaks; a field that this version lacks cannot."""
    for rule in rules:
        value = getattr(owner, rule.field, rule.allowed[0])
        if value not in rule.allowed:
            yield f"{rule.field} is {value!r}: {rule.meaning}"


def fill(arguments: Any, block: int, device: str) -> None:
    """Check a server's arguments and set those that follow; ``block`` is the drafter's block length, root included.

    Raises ``ConfigError`` that lists everything refused, or for a bad ``KDTREE_BUDGET`` or ``KDTREE_LADDER``.
    """
    refused = list(_broken(arguments, _RULES))
    if torch.version.hip is not None:  # its device is called cuda too
        hip = "takes top-k 1, which is DDTREE's, for a chain and may leave the tree mask out"
        refused.append(f"torch is a build for HIP (ROCm {torch.version.hip}): SGLang for it {hip}")
    if device not in ("cuda", "cpu"):
        refused.append(f"device is {device!r}: only cuda is served (and cpu, in Triton's interpreter)")
    width = arguments.speculative_num_draft_tokens
    width = max(DEFAULT_WIDTH, block) if width is None else int(width)
    if not block <= width <= MAX_BUDGET + 1:
        refused.append(
            f"speculative_num_draft_tokens is {width}: budget + 1 nodes, at least the drafter's block of {block} "
            f"(its rows are drafted in the same slots) and at most {MAX_BUDGET + 1}"
        )
    window = getattr(arguments, "speculative_draft_window_size", None)
    if window is not None and window < block:
        refused.append(f"speculative_draft_window_size is {window}: at least the drafter's block of {block}")
    if refused:
        raise ConfigError(f"--speculative-algorithm {NAME} does not serve: {'; '.join(refused)}")
    ladder_of(block, width)  # read again by the worker: a bad one is refused here
    arguments.speculative_num_draft_tokens = width
    arguments.speculative_num_steps = 1  # SGLang sizes KV reserves by them, as for DFLASH
    arguments.speculative_eagle_topk = 1
    if arguments.max_running_requests is None:
        arguments.max_running_requests = MAX_RUNNING


def refuse_request(request: Any) -> str | None:
    """Say why a request is refused, None if it is served."""
    found = [*_broken(request, _REQUEST), *_broken(request.sampling_params, _SAMPLING)]
    return f"{NAME} does not serve: {'; '.join(found)}" if found else None
