"""``tree_accept`` and ``tree_accept_sampled`` on a CPU: the pure core's walk, and its law at the nodes it visits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from treeverify.errors import ContractError
from treeverify.ops.tree_accept.contract import (
    NO_NODE,
    NO_TOKEN,
    SAMPLED,
    Accepted,
    LawTensors,
    check_samples,
    check_values,
)
from treeverify.tree.accept import walk
from treeverify.tree.law import LawParams, sample, target_law


def tree_accept_cpu(tokens: torch.Tensor, parents: torch.Tensor, samples: torch.Tensor, out: Accepted) -> None:
    """Walk with the given samples of a checked call. Raises ``ContractError`` for a negative one."""
    check_samples(samples)
    given = samples.tolist()
    _walk(tokens, parents, lambda request, node, _: given[request][node], out)


def tree_accept_sampled_cpu(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    logits: torch.Tensor,
    law: LawTensors,
    uniforms: torch.Tensor,
    out: Accepted,
) -> None:
    """Walk with samples drawn where it comes by. Raises ``ContractError`` as ``api.tree_accept_sampled`` says."""
    check_values(law, uniforms)
    width, numbers = tokens.shape[1], uniforms.numpy()
    columns = (law.temperature.tolist(), law.top_k.tolist(), law.top_p.tolist(), law.min_p.tolist())
    params = [LawParams(*each) for each in zip(*columns, strict=True)]

    def draw(request: int, node: int, step: int) -> int:
        row = request * width + node
        try:
            law_of_node = target_law(logits[row].float().numpy(), params[request])
        except ContractError as error:
            expected, got = "finite or -inf, and not all -inf", "NaN, +inf or no finite logit"
            raise ContractError.of(SAMPLED, f"logits[{row}]", expected, got) from error
        return int(sample(law_of_node, np.asarray(numbers[request, step])))

    _walk(tokens, parents, draw, out)


def _walk(tokens: torch.Tensor, parents: torch.Tensor, draw: Callable[[int, int, int], int], out: Accepted) -> None:
    """``draw(request, node, step)`` is asked at each node of a walk."""
    depth = out.path.shape[1] - 1
    walks = [
        walk(ids, up, partial(draw, request), depth)
        for request, (ids, up) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True))
    ]
    out.path.fill_(NO_NODE)
    out.new_tokens.fill_(NO_TOKEN)
    for request, (path, new) in enumerate(walks):
        out.path[request, : len(path)] = torch.tensor(path, dtype=torch.int32)
        out.new_tokens[request, : len(new)] = torch.tensor(new)
        out.lengths[request], out.bonus[request] = len(path), new[-1]
