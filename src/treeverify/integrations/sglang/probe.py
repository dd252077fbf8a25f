"""What this process serves, as plain values: part of the server's info under the key ``treeverify``."""

from __future__ import annotations

import treeverify
from treeverify.integrations.sglang import names
from treeverify.integrations.sglang.attention import Verifier

_served: list[Verifier] = []


def add(verifier: Verifier) -> None:
    """Report ``verifier`` from now on."""
    _served.append(verifier)


def report() -> dict[str, object]:
    """Return version, mode and what each backend of this process has counted. Waits for the device.

    ``backends`` is empty in mode ``off``, where SGLang's own backend serves.
    """
    return {
        "version": treeverify.__version__,
        "sglang": names.version(),
        "mode": _served[0].mode.value if _served else "off",
        "backends": [_of(verifier) for verifier in _served],
    }


def _of(verifier: Verifier) -> dict[str, object]:
    layers = verifier.counters.read()
    facts = verifier.facts
    return {
        "mode": verifier.mode.value,
        "kernel": verifier.kernel,
        "device": str(facts.device),
        "heads": facts.heads,
        "nodes": facts.nodes,
        "shapes": [list(shape) for shape in sorted(verifier.shapes)],
        "left_to_parent": dict(verifier.left_to_parent),
        "layers": layers,
    }
