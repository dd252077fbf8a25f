"""Names of all implementations, and how each is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from treeverify.bench.rivals import fa2_mla, fa3, flashmla, ours, triton_extend
from treeverify.bench.rivals.base import Implementation, Missing
from treeverify.errors import ConfigError, TreeverifyError

_LOADERS: Mapping[str, Callable[[str], Implementation]] = {
    "treeverify-portable": ours.load,
    "treeverify-portable-99k": ours.load,
    "treeverify-portable-served": ours.load,
    "treeverify-naive": ours.load,
    "treeverify-split_kv": ours.load,
    "triton-extend": triton_extend.load,
    "fa2-mla": fa2_mla.load,
    "flashmla-causal": flashmla.load,
    "fa3-cascade": fa3.load,
    "fa3-causal": fa3.load,
}
NAMES = tuple(name for name in _LOADERS if name != "treeverify-split_kv")
"""What a GPU benchmark runs. ``treeverify-split_kv``, the torch algorithm, is for trying the benchmark on a CPU."""

_FAILURES = (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError, AssertionError, TreeverifyError)


def load(name: str) -> Implementation | Missing:
    """Import what ``name`` needs; raises ``ConfigError`` for an unknown name only."""
    loader = _LOADERS.get(name)
    if loader is None:
        raise ConfigError(f"implementation: expected one of {', '.join(_LOADERS)}; got {name!r}")
    try:
        return loader(name)
    except _FAILURES as error:
        return Missing(name, f"{type(error).__name__}: {error}")
