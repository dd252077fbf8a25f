"""The definition of ``feature_gather``: one request at a time."""

from __future__ import annotations

import torch

from treeverify.ops.feature_gather.contract import Gathered, check, check_values


def feature_gather_reference(
    features: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    prefix_lengths: torch.Tensor,
) -> Gathered:
    """Gather; arguments and result as in ``api.feature_gather``, whatever the device.

    Raises:
        ContractError: the call breaks the contract, a length is outside 1..depth+1, or a path leaves the width.
    """
    check(features, path, lengths, slots, prefix_lengths, None)
    check_values(path, lengths, slots)
    batch, width = slots.shape
    out = Gathered.empty(batch, path.shape[1] - 1, features)
    for tensor in (out.features, out.slots, out.positions):
        tensor.zero_()
    for request, length in enumerate(lengths.tolist()):
        nodes = path[request, :length].long()
        places = torch.arange(length, device=slots.device)
        out.features[request, :length] = features[request * width + nodes]
        out.slots[request, :length] = slots[request, :length].long()
        out.positions[request, :length] = prefix_lengths[request].long() + places
    return out
