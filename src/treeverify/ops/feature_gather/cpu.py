"""``feature_gather`` on a CPU: one gather of all requests' rows."""

from __future__ import annotations

import torch

from treeverify.ops.feature_gather.contract import Gathered, check_values


def feature_gather_cpu(
    features: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    prefix_lengths: torch.Tensor,
    out: Gathered,
) -> None:
    """Gather a checked call's rows into the first of ``out``, zeros after them. Raises ``ContractError``."""
    check_values(path, lengths, slots)
    (batch, width), columns = slots.shape, path.shape[1]
    places = torch.arange(columns)
    padding = places >= lengths.unsqueeze(1)
    rows = path.long().masked_fill(padding, 0) + torch.arange(batch).unsqueeze(1) * width
    for tensor in (out.features, out.slots, out.positions):
        tensor[batch:] = 0
    out.features[:batch] = features[rows].masked_fill(padding.unsqueeze(2), 0)
    kept = slots.gather(1, places.clamp(max=width - 1).expand(batch, columns))
    out.slots[:batch] = kept.masked_fill(padding, 0)
    out.positions[:batch] = (prefix_lengths.unsqueeze(1) + places).masked_fill(padding, 0)
