"""The compiled ``feature_gather``: passes the buffers to the library; no arithmetic, no allocation, no wait."""

from __future__ import annotations

import torch

from treeverify.ops import compiled
from treeverify.ops.feature_gather.contract import Gathered


def feature_gather_cuda(
    features: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    prefix_lengths: torch.Tensor,
    out: Gathered,
) -> None:
    """Launch on torch's current stream; arguments as in ``api.feature_gather``.

    Raises ``ValueError`` and ``BuildError``.
    """
    run = compiled.function("feature_gather", features.device)
    run(features, path, lengths, slots, prefix_lengths, out.features, out.slots, out.positions)
