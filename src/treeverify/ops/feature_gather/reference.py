"""The definition of ``feature_gather``: one request at a time."""

from __future__ import annotations

import torch

from treeverify.ops.feature_gather.contract import Gathered, check


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
    checker = check(features, path, lengths, slots, prefix_lengths, None)
    batch, width = slots.shape
    out = Gathered.empty(batch, path.shape[1] - 1, features)
    for tensor in (out.features, out.slots, out.positions):
        tensor.zero_()
    for request, length in enumerate(lengths.tolist()):
        if not 1 <= length <= path.shape[1]:
            raise checker.refuse(f"lengths[{request}]", f"1..{path.shape[1]}", length)
        nodes = path[request, :length].long()
        if not bool(((nodes >= 0) & (nodes < width)).all()):
            raise checker.refuse(f"path[{request}]", f"nodes 0..{width - 1}", nodes.tolist())
        places = torch.arange(length, device=slots.device)
        out.features[request, :length] = features[request * width + nodes]
        out.slots[request, :length] = slots[request, :length].long()
        out.positions[request, :length] = prefix_lengths[request].long() + places
    return out
