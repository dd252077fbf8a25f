"""What DDTREE registers and replaces in SGLang, once per process: algorithm, masks of graphs, slot table, refusals."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

from treeverify.integrations.sglang import additions
from treeverify.integrations.sglang.ddtree.compat import (
    BASE_RUNNER,
    GRAPHS,
    INFO,
    POOLS,
    RESERVE,
    RESULTS,
    SCHEDULER,
    given_out,
    output_lengths,
)
from treeverify.integrations.sglang.names import find

_REGISTRY = "sglang.srt.speculative.spec_registry"
_OURS = "ddtree"
_AS_DFLASH = (
    "is_dflash",
    "is_dflash_family",
    "supports_target_verify_for_draft",
    "supports_prefill_shared_read_done",
    "has_draft_kv",
    "carries_draft_hidden_states",
    "need_topk",
)
"""Questions that the scheduler and the runners ask of an algorithm, and that DDTREE answers as DFLASH does."""


def register(
    name: str,
    factory: Callable[[Any], type],
    fill: Callable[[Any], None],
    block: Callable[[], int],
) -> None:
    """Register the algorithm; ``fill`` checks and completes server arguments, ``block`` is the drafter's block."""
    registry, builtin = import_module(_REGISTRY), find(f"{INFO}.SpeculativeAlgorithm")
    if registry.get_spec(name) is not None:
        return

    class DDTreeAlgorithm(registry.CustomSpecAlgo):  # type: ignore[misc, name-defined]
        """Answers as DFLASH, but verifies ``width`` tokens per request where the draft runs ``block``."""

        def handle_server_args(self, server_args: Any) -> None:
            fill(server_args)

        def create_future_map(self, *arguments: Any, **options: Any) -> Any:
            return builtin.create_future_map(self, *arguments, **options)

        def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
            return block() if is_draft_worker else num_draft_tokens

    for question in _AS_DFLASH:
        if hasattr(builtin, question):
            setattr(DDTreeAlgorithm, question, _answer(getattr(builtin.DFLASH, question)()))
    builtin.register(name, supports_overlap=True, spec_class=DDTreeAlgorithm)(factory)


def _answer(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def install(name: str, refuse: Callable[[Any], str | None]) -> None:
    """Give captured graphs a tree mask and the slot table room, refuse requests, count tokens; once per process.

    Called where the worker is made: before the pools.
    """
    base, scheduler = import_module(BASE_RUNNER), import_module(SCHEDULER)
    wrap = additions.wrap
    wrap(find(GRAPHS), "get_spec_info", _OURS, lambda stock: _with_mask(stock, name))
    wrap(base, "create_dummy_verify_input", _OURS, lambda stock: _dummy_with_mask(stock, name))
    wrap(import_module(POOLS), "get_req_to_token_extra_context_len", _OURS, _with_reserve)
    wrap(scheduler, "validate_dflash_request", _OURS, lambda stock: _with_refusals(stock, refuse))
    wrap(find(RESULTS), "process_batch_result_decode", _OURS, _with_count)


def add_to_report(key: str, report: Callable[[], dict[str, object] | None]) -> None:
    """Add ``report()`` to the scheduler's state in the info query."""
    owner, name = find(f"{SCHEDULER}.Scheduler"), "get_internal_state"
    additions.wrap(owner, name, _OURS, lambda stock: additions.with_entry(stock, key, lambda _: report()))


def _with_mask(stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    """DFLASH captures its verify without a mask. Ours must have one, or a tree would be verified as a chain."""

    def get_spec_info(graphs: Any, num_tokens: int) -> Any:
        found, runner = stock(graphs, num_tokens), graphs.model_runner
        if runner.spec_algorithm.name == name and not runner.is_draft_worker:
            found.custom_mask = graphs.buffers.custom_mask
        return found

    return get_spec_info


def _dummy_with_mask(stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same for the forwards that warm a runner up; the draft's tokens per request are not the target's."""

    parameters = signature(stock)

    def create(spec_algorithm: Any, *rest: Any, **options: Any) -> Any:
        found = stock(spec_algorithm, *rest, **options)
        if getattr(spec_algorithm, "name", None) == name:
            given = parameters.bind(spec_algorithm, *rest, **options).arguments  # 0.5.17 has one more in between
            found.draft_token_num = found.num_tokens_per_req = given["num_tokens_per_req"]
            found.custom_mask = None if given["is_draft_worker"] else given["custom_mask"]
        return found

    return create


def _with_reserve(stock: Callable[..., int]) -> Callable[..., int]:
    """Room in a row of the slot table for what SGLang reserves beyond a request at the end of its context.

    With pages of one token it makes room for one step and 4 slots, but reserves two steps: the rest would be written
    into the next request's row, and read from there.
    """

    def extra(*arguments: Any) -> int:  # 0.5.17 hands its server arguments in
        reserved: int = find(RESERVE)(*arguments)
        return max(stock(*arguments), reserved)

    return extra


def _with_refusals(stock: Callable[..., Any], refuse: Callable[[Any], str | None]) -> Callable[..., Any]:
    def validate(req: Any, enable_overlap: bool) -> Any:
        return refuse(req) or stock(req, enable_overlap)

    return validate


def _with_count(stock: Callable[..., None]) -> Callable[..., None]:
    """Tell the worker what a step has given out: only here has SGLang cut the accepted paths at stops and limits."""

    def process_batch_result_decode(processor: Any, batch: Any, result: Any) -> None:
        before = additions.attempt(lambda: output_lengths(batch))
        stock(processor, batch, result)
        if not isinstance(before, additions.Failed):
            additions.attempt(lambda: processor.model_worker.count(given_out(before)))

    return process_batch_result_decode
