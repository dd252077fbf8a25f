"""The definitions of ``tree_accept`` and ``tree_accept_sampled``: plain loops over requests, the law in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from treeverify.errors import ContractError
from treeverify.ops.tree_accept.contract import (
    GREEDY_BELOW,
    NO_NODE,
    NO_TOKEN,
    SAMPLED,
    Accepted,
    LawTensors,
    check,
    check_sampled,
    check_samples,
    check_values,
)


def tree_accept_reference(
    tokens: torch.Tensor, parents: torch.Tensor, samples: torch.Tensor, *, depth: int
) -> Accepted:
    """Walk with given samples; arguments and result as in ``api.tree_accept``, whatever the device.

    Raises:
        ContractError: the call breaks the contract, or a sample is negative.
    """
    check(tokens, parents, samples, depth, None)
    check_samples(samples)
    return _walk(tokens, parents, depth, lambda request, node, _: int(samples[request, node]))


def tree_accept_sampled_reference(
    tokens: torch.Tensor, parents: torch.Tensor, logits: torch.Tensor, law: LawTensors, uniforms: torch.Tensor
) -> Accepted:
    """Walk with samples drawn from the law; arguments and result as in ``api.tree_accept_sampled``.

    Raises:
        ContractError: the call breaks the contract; a parameter or uniform is out of range; a visited node's logits
            hold NaN, +inf or nothing but -inf.
    """
    check_sampled(tokens, parents, logits, law, uniforms, None)
    check_values(law, uniforms)
    width = tokens.shape[1]

    def draw(request: int, node: int, step: int) -> int:
        row = logits[request * width + node].double()
        probabilities = law_reference(row, law, request, f"logits[{request * width + node}]")
        cumulative = probabilities.cumsum(0)
        return int((cumulative <= uniforms[request, step] * cumulative[-1]).sum())

    return _walk(tokens, parents, uniforms.shape[1] - 1, draw)


def law_reference(logits: torch.Tensor, law: LawTensors, request: int, name: str = "logits") -> torch.Tensor:
    """The law float64 ``[vocab]`` of one row of float64 logits under the parameters of ``request``.

    In this order: temperature, top-k, top-p on what top-k left, min-p against the largest weight; tokens rank by
    falling logit, equal logits by rising id. Raises ContractError for a row that has no law.
    """
    if not bool((logits < torch.inf).all()) or bool((logits == -torch.inf).all()):
        raise ContractError.of(SAMPLED, name, "finite or -inf, and not all -inf", "NaN, +inf or no finite logit")
    order = torch.sort(logits, descending=True, stable=True).indices
    temperature = float(law.temperature[request])
    if temperature < GREEDY_BELOW:
        return torch.zeros_like(logits).index_fill_(0, order[:1], 1.0)
    weights = ((logits - logits[order[0]]) / temperature).exp()
    kept = order[: int(law.top_k[request])]
    top_p = float(law.top_p[request])
    if top_p < 1:
        cumulative = weights[kept].cumsum(0)
        kept = kept[: 1 + int((cumulative < top_p * cumulative[-1]).sum())]
    kept = kept[weights[kept] >= float(law.min_p[request])]
    probabilities = torch.zeros_like(logits).index_copy_(0, kept, weights[kept])
    return probabilities / probabilities.sum()


def _walk(tokens: torch.Tensor, parents: torch.Tensor, depth: int, draw: Callable[[int, int, int], int]) -> Accepted:
    batch, width = tokens.shape
    out = Accepted.empty(batch, width, depth, tokens.device)
    out.path.fill_(NO_NODE)
    out.new_tokens.fill_(NO_TOKEN)
    for request in range(batch):
        ids, up = tokens[request].tolist(), parents[request].tolist()
        path, new = [0], [draw(request, 0, 0)]
        while len(path) <= depth:
            children = [i for i in range(path[-1] + 1, width) if up[i] == path[-1] and ids[i] == new[-1]]
            if not children:
                break
            path.append(children[0])
            new.append(draw(request, path[-1], len(path) - 1))
        out.path[request, : len(path)] = torch.tensor(path, dtype=torch.int32)
        out.new_tokens[request, : len(new)] = torch.tensor(new)
        out.lengths[request], out.bonus[request] = len(path), new[-1]
    return out
