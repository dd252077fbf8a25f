"""What is replaced in SGLang, once per process, beside the attention backend itself. ``compat.check`` runs before.

Drafts of our name, the server's info, the live switch, CUDA graphs per mode, and the policy that names backends by
class. Control requests reach every rank of a group in the same order, so a collective inside one is safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from treeverify.control.wire import ERROR_KEY, MODE_KEY, STATE_KEY
from treeverify.errors import ConfigError
from treeverify.integrations.sglang import compat, graphs, modes
from treeverify.integrations.sglang.additions import Failed, Stock, attempt, with_entry, wrap
from treeverify.integrations.sglang.names import find, read

logger = logging.getLogger(__name__)
_OURS = "verify"


class Providers(NamedTuple):
    """What the hooks call back."""

    rank: Callable[[int], object]
    """State of this process as rank ``n`` of its group."""
    server: Callable[[list[Any]], dict[str, object]]
    """Entry of the info query, from the states of all ranks."""
    draft: Callable[[Any], Any]
    """Our backend for a draft's extend calls, None to keep SGLang's."""
    step: Callable[[], None]
    """After each forward pass: what is due beside serving."""


def install(providers: Providers) -> None:
    """Replace SGLang's functions; a second call changes nothing."""
    dflash: Any = import_module(compat.DFLASH)
    dflash._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS |= {compat.CLASS_NAME}  # compared with type(backend).__name__
    factory, scheduler = find(compat.DRAFT_FACTORY), find(compat.SCHEDULER)
    wrap(factory, "_create_backend", _OURS, lambda stock: _drafts_of_our_name(stock, providers.draft))
    wrap(scheduler, "get_internal_state", _OURS, lambda stock: _with_report(stock, providers))
    wrap(scheduler, "set_internal_state", _OURS, _with_switch)
    wrap(scheduler, "run_batch", _OURS, lambda stock: _with_step(stock, providers.step))
    full = find(compat.FULL_GRAPHS)
    wrap(full, "capture_one", _OURS, graphs.with_modes)
    wrap(full, "capture_session", _OURS, graphs.with_measure)
    wrap(full, "replay", _OURS, graphs.of_current_mode)
    wrap(find(compat.BREAKABLE_GRAPHS), "capture_one", _OURS, graphs.of_one_mode)


def _drafts_of_our_name(stock: Stock, draft: Callable[[Any], Any]) -> Stock:
    """The factory of draft backends refuses names that it does not know: ours means ours for extend, else Triton."""

    def create(factory: Any, backend_name: str, backend_map: dict[str, Any], *rest: Any, **options: Any) -> Any:
        make = backend_map["triton"]
        extend = make == factory._create_triton_prefill_backend

        def ours() -> Any:
            made = make()
            backend = draft(factory.draft_model_runner) if extend else None
            if backend is None:
                return made
            return (made[0], backend) if isinstance(made, tuple) else backend  # 0.5.23 names the backend with it

        return stock(factory, backend_name, {**backend_map, compat.BACKEND: ours}, *rest, **options)

    return create


def _with_report(stock: Stock, providers: Providers) -> Stock:
    """The states of all ranks, or which of them failed and why: each rank sends one or the other, or all would wait."""

    def entry(scheduler: Any) -> dict[str, object]:
        states = gather(scheduler, lambda number: attempt(lambda: providers.rank(number)))
        failed = [f"rank {number}: {state.reason}" for number, state in enumerate(states) if isinstance(state, Failed)]
        return {ERROR_KEY: "; ".join(failed)} if failed else providers.server(states)

    return with_entry(stock, STATE_KEY, entry)


def _with_step(stock: Stock, step: Callable[[], None]) -> Stock:
    def run_batch(*arguments: Any, **options: Any) -> Any:
        result = stock(*arguments, **options)
        attempt(step)
        return result

    return run_batch


def _with_switch(stock: Stock) -> Stock:
    """Serve ``treeverify_mode``: all ranks of the group change, or none; the reply says which."""

    def set_internal_state(scheduler: Any, recv_req: Any) -> Any:
        if MODE_KEY not in recv_req.server_args:
            return stock(scheduler, recv_req)
        switch, wanted, refused = modes.current(), None, ""
        try:
            wanted = switch.requested(recv_req.server_args)
        except ConfigError as error:
            refused = str(error)
        reasons = [reason for reason in gather(scheduler, lambda _: refused) if reason]
        if reasons or wanted is None:
            logger.error("treeverify: live switch refused: %s", reasons[0])
        else:
            switch.change(wanted, read(scheduler, "forward_ct"))
        return find(compat.SWITCH_REPLY)(updated=not reasons)

    return set_internal_state


def gather(scheduler: Any, make: Callable[[int], Any]) -> list[Any]:
    """Return ``make(rank)`` of every rank of the group that one control request reaches at the same step."""
    import torch.distributed as dist

    arguments = read(scheduler, "server_args")
    local = getattr(arguments, "enable_dp_attention_local_control_broadcast", False)
    group = read(scheduler, "attn_tp_cpu_group" if local else "tp_cpu_group")
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, make(dist.get_rank(group)), group=group)
    return states
