"""The definition of ``tree_mask``: one request at a time, ancestors by following parents."""

from __future__ import annotations

import torch

from treeverify.ops.tree_mask.contract import TreeMasks, check

_NO_LINK = -1


def tree_mask_reference(parents: torch.Tensor, prefix_lengths: torch.Tensor, out: TreeMasks) -> TreeMasks:
    """Fill the outputs that ``out`` holds; arguments as in ``api.tree_mask``, whatever the device.

    Raises:
        ContractError: the call breaks the contract.
    """
    check(parents, prefix_lengths, out)
    batch, width = parents.shape
    begin = 0
    for request in range(batch):
        tree, prefix = _checked(parents[request].tolist()), int(prefix_lengths[request])
        visible = _visibility(tree).to(parents.device)
        if out.bits is not None:
            _pack(visible, out.bits[request])
        if out.positions is not None:
            depths = [_depth(tree, node) for node in range(width)]
            out.positions[request * width : (request + 1) * width] = prefix + torch.tensor(
                depths, device=parents.device
            )
        if out.full_mask is not None:
            end = begin + width * (prefix + width)
            out.full_mask[begin:end].view(width, prefix + width)[:, prefix:] = visible
            begin = end
        if out.qlen_mask is not None:
            out.qlen_mask[request * width * width : (request + 1) * width * width] = visible.flatten()
        if out.retrieve is not None:
            _link(tree, request * width, out.retrieve[:, request])
    return out


def _checked(parents: list[int]) -> list[int]:
    """Parents, -1 for the root and for padding."""
    return [parent if 0 <= parent < node else -1 for node, parent in enumerate(parents)]


def _depth(parents: list[int], node: int) -> int:
    return 0 if parents[node] < 0 else 1 + _depth(parents, parents[node])


def _visibility(parents: list[int]) -> torch.Tensor:
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, node] = True
    return visible


def _pack(visible: torch.Tensor, words: torch.Tensor) -> None:
    """Rows bool ``[width, width]`` into ``words`` ``[width, ceil(width/64)]``."""
    signed = words.view(torch.int64)
    for word in range(signed.shape[1]):
        columns = visible[:, 64 * word : 64 * word + 64].to(torch.int64)
        weights = torch.ones((), dtype=torch.int64) << torch.arange(columns.shape[1])  # bit 63 is the sign
        signed[:, word] = (columns * weights.to(columns.device)).sum(dim=1)


def _link(parents: list[int], first: int, links: torch.Tensor) -> None:
    """Links ``[3, width]`` of one request, whose root is row ``first`` of the batch."""
    width = len(parents)
    child, sibling = [_NO_LINK] * width, [_NO_LINK] * width
    for node in range(width - 1, 0, -1):  # from the last: each new child goes to the front of its parent's list
        if parents[node] >= 0:
            child[parents[node]], sibling[node] = node, child[parents[node]]
    links.copy_(torch.tensor([list(range(first, first + width)), child, sibling]))
