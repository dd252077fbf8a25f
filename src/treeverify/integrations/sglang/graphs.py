"""One set of CUDA graphs per allowed mode: a captured graph has its mode baked in.

SGLang's full-graph backend keeps its graphs by shape. A graph in whose capture our attention asked for the mode is
captured once more for each further allowed mode, under the shape's key with the mode in its label, into the same
memory pool; a replay takes that of the current mode. Graphs that never asked (drafts on Triton, prefill) stay single.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from treeverify.env import VerifyMode
from treeverify.errors import ConfigError
from treeverify.integrations.sglang import modes

logger = logging.getLogger(__name__)

_ASKED = "treeverify_asked"
_EXTRA = "treeverify_extra_bytes"
Stock = Callable[..., Any]


def key_of(shape_key: Any, mode: VerifyMode) -> Any:
    """Return ``shape_key``'s own key for the graph of ``mode``."""
    label = "" if shape_key.variant_label is None else shape_key.variant_label
    return dataclasses.replace(shape_key, variant_label=f"{label}@{mode.value}")


def with_modes(stock: Stock) -> Stock:
    """Wrap ``capture_one``: one graph per allowed mode where the mode matters."""

    def capture_one(backend: Any, shape_key: Any, forward_fn: Callable[[], Any], *rest: Any, **options: Any) -> None:
        switch = modes.current()
        free = _free_bytes()
        with switch.capture(switch.start) as asked:
            stock(backend, shape_key, forward_fn, *rest, **options)
        if not asked:
            return
        further = [mode for mode in switch.allowed if mode is not switch.start]
        asked_for: dict[Any, list[Any]] = backend.__dict__.setdefault(_ASKED, {})
        if further and not asked_for:
            _state_estimate(further, free - _free_bytes())
        asked_for[shape_key] = asked
        free = _free_bytes()
        for mode in further:
            with switch.capture(mode):
                stock(backend, key_of(shape_key, mode), forward_fn, *rest, **options)
        setattr(backend, _EXTRA, getattr(backend, _EXTRA, 0) + free - _free_bytes())

    return capture_one


def with_measure(stock: Stock) -> Stock:
    """Wrap ``capture_session``: say what the further graph sets took."""

    @contextmanager
    def capture_session(backend: Any, *arguments: Any, **options: Any) -> Iterator[None]:
        with stock(backend, *arguments, **options):
            yield
        asked_for = getattr(backend, _ASKED, {})
        further = len(modes.current().allowed) - 1
        if asked_for and further:
            taken = getattr(backend, _EXTRA) / 2**20
            logger.info("treeverify: %d further graph sets of %d shapes took %.0f MiB", further, len(asked_for), taken)

    return capture_session


def of_current_mode(stock: Stock) -> Stock:
    """Wrap ``replay``: the graph of the current mode."""

    def replay(backend: Any, shape_key: Any, batch: Any, *rest: Any, **options: Any) -> Any:
        asked = getattr(backend, _ASKED, {}).get(shape_key)
        if asked is not None:
            switch = modes.current()
            if switch.mode is VerifyMode.OFF and not switch.capturing:  # no part of ours counts in that graph
                requests = getattr(batch, "batch_size", shape_key.size)  # some drafts replay without their batch
                nodes = getattr(getattr(batch, "spec_info", None), "draft_token_num", None)
                for verifier in asked:
                    verifier.served_off(requests * (nodes or verifier.facts.nodes))
            if switch.mode is not switch.start:
                shape_key = key_of(shape_key, switch.mode)
        return stock(backend, shape_key, batch, *rest, **options)

    return replay


def of_one_mode(stock: Stock) -> Stock:
    """Wrap ``capture_one`` of another kind of graph backend, which keeps no graph per mode."""

    def capture_one(backend: Any, *arguments: Any, **options: Any) -> None:
        switch = modes.current()
        with switch.capture(switch.start) as asked:
            stock(backend, *arguments, **options)
        if asked and len(switch.allowed) > 1:
            allowed = ",".join(switch.allowed)
            raise ConfigError(
                f"KDTREE_VERIFY_ALLOW={allowed}: {type(backend).__name__} cannot hold a graph per mode. "
                "Use --cuda-graph-backend-decode full or disabled, or allow one mode"
            )

    return capture_one


def _state_estimate(further: list[VerifyMode], first: int) -> None:
    names = ", ".join(mode.value for mode in further)
    logger.info(
        "treeverify: capturing a further set of CUDA graphs for each of %s, in the shared memory pool; estimated at "
        "most %.0f MiB per set (the first graph, of the largest shape, took that with its part of the pool)",
        names,
        max(first, 0) / 2**20,
    )


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
