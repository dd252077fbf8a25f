"""The contract of ``feature_gather``: what the drafter must write into its own KV cache after a step.

For j below ``lengths[i]`` row j of request i is the feature of node ``path[i, j]``, its slot is ``slots[i, j]`` (where
``kv_compact`` put that node's KV row; the drafter's pool uses the target's slots) and its position is
``prefix_lengths[i] + j``. The rows after that are padding: feature 0, slot 0 (the dummy slot), position 0. They are
finite, so a dense draft forward may run over them and write them where nobody reads. Outputs may have room for more
requests than the batch, as those of a captured graph do: the requests past the batch are padding too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeverify.ops.checks import INDEX_DTYPES, Checker

OPERATOR = "feature_gather"
MAX_WIDTH = 257
FEATURE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Gathered:
    """The packed rows of a batch, or of a batch and padding."""

    features: torch.Tensor
    """``[batch, depth+1, dim]``, dtype of the features."""
    slots: torch.Tensor
    """``[batch, depth+1]`` int64."""
    positions: torch.Tensor
    """``[batch, depth+1]`` int64."""

    @classmethod
    def empty(cls, batch: int, depth: int, features: torch.Tensor) -> Gathered:
        """Unwritten outputs for features like these."""
        columns, device = depth + 1, features.device
        return cls(
            torch.empty(batch, columns, features.shape[1], dtype=features.dtype, device=device),
            torch.empty(batch, columns, dtype=torch.int64, device=device),
            torch.empty(batch, columns, dtype=torch.int64, device=device),
        )


def check(
    features: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    prefix_lengths: torch.Tensor,
    out: Gathered | None,
) -> Checker:
    """Check one call (see ``api.feature_gather``); raises ``ContractError``. Reads no value of a tensor."""
    checker = Checker.of(OPERATOR, "features", features)
    checker.tensor("slots", slots, INDEX_DTYPES, (None, None))
    batch, width = slots.shape
    checker.integer("slots: dimension 1 (width)", width, 1, MAX_WIDTH)
    checker.rows("features", features, FEATURE_DTYPES, (batch * width, None))
    checker.tensor("path", path, (torch.int32,), (batch, None))
    columns = checker.integer("path: dimension 1 (depth + 1)", path.shape[1], 1, MAX_WIDTH)
    checker.tensor("lengths", lengths, (torch.int32,), (batch,))
    checker.tensor("prefix_lengths", prefix_lengths, INDEX_DTYPES, (batch,))
    if out is not None:
        dim = features.shape[1]
        checker.tensor("out.features", out.features, (features.dtype,), (None, columns, dim))
        rows = out.features.shape[0]
        if rows < batch:
            raise checker.refuse("out.features: dimension 0", f">= {batch}", rows)
        checker.tensor("out.slots", out.slots, (torch.int64,), (rows, columns))
        checker.tensor("out.positions", out.positions, (torch.int64,), (rows, columns))
    return checker
