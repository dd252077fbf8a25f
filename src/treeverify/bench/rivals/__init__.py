"""The implementations that the attention benchmark compares: ours and others' kernels, one adapter each.

An adapter imports an installed package and calls it; no code of a rival lives here. ``load`` returns an
``Implementation``, or a ``Missing`` that says why there is none on this machine.
"""

from __future__ import annotations

from treeverify.bench.rivals.base import MOST_CALL_US, Call, Implementation, Missing, TooSlowError
from treeverify.bench.rivals.catalogue import NAMES, load

__all__ = ["MOST_CALL_US", "NAMES", "Call", "Implementation", "Missing", "TooSlowError", "load"]
