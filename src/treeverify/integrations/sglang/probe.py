"""What this process serves, in the form of ``control.schema``: part of the server's info under ``treeverify``."""

from __future__ import annotations

import os

import treeverify
from treeverify.control.metrics import Metrics
from treeverify.control.schema import BackendState, LayerCounts, ModeCounts, PluginState, RankState, Shape
from treeverify.integrations.sglang import modes, names
from treeverify.integrations.sglang.attention import Verifier
from treeverify.integrations.sglang.counters import BOUND_ULP
from treeverify.integrations.sglang.observer import Observer

_served: list[Verifier] = []
_observer: Observer | None = None


def add(verifier: Verifier) -> None:
    """Report ``verifier`` from now on."""
    _served.append(verifier)


def observe(group: int, number: int, metrics: bool) -> None:
    """Do the rounds of rank ``number`` of ``group`` from now on, with ``metrics`` exported or not."""
    global _observer
    if _observer is None:
        _observer = Observer(_served, lambda: rank(number, wait=False), Metrics(group) if metrics else None)


def step() -> None:
    """Do what is due after a forward pass. Waits for the device only to write a dump."""
    if _observer is not None:
        _observer.tick()


def rank(number: int, wait: bool = True) -> RankState:
    """Return mode, switches and counts of this process, rank ``number`` of its group.

    Waits for the device, and writes a call that is to be dumped; without ``wait``, counts are the last snapshot's.
    ``backends`` has the target's first, then a draft's; it is empty where SGLang's own backend serves.
    """
    switch = modes.current()
    return RankState(
        rank=number,
        pid=os.getpid(),
        mode=switch.mode,
        allowed=list(switch.allowed),
        switches=switch.switches,
        switched_at=switch.switched_at,
        backends=[_backend(verifier, wait) for verifier in _served],
    )


def server(ranks: list[RankState]) -> dict[str, object]:
    """Return the entry of one data-parallel group as plain values."""
    state = PluginState(version=treeverify.__version__, engine=f"sglang {names.version()}", ranks=ranks)
    return state.model_dump(mode="json")


def _backend(verifier: Verifier, wait: bool) -> BackendState:
    facts, figures, dumper = verifier.facts, verifier.counters.read(wait), verifier.dumper
    if dumper is not None and wait:
        dumper.drain(wait=True)
    served = {name: ModeCounts(**counts) for name, counts in figures["served"].items()}
    return BackendState(
        kernel=verifier.kernel,
        device=str(facts.device),
        heads=facts.heads,
        nodes=facts.nodes,
        bound_ulp=BOUND_ULP,
        breaches=figures["breaches"],
        dumps=0 if dumper is None else dumper.written,
        shapes=[
            Shape(requests=requests, nodes=nodes, heads=heads, mask=mask, modes=sorted(seen))
            for (requests, nodes, heads, mask), seen in sorted(verifier.shapes.items())
        ],
        left_to_parent=dict(verifier.left_to_parent),
        served=served | {"off": verifier.off},
        layers=[LayerCounts(**layer) for layer in figures["layers"]],
    )
