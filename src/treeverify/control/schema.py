"""What a server says of its verify attention: the value of ``internal_states[i].treeverify`` in its ``/server_info``.

The SGLang plugin and ``treeverify serve`` both write it; the probe, the metrics and the cutover read it. A missing
field or one of another type is an error: a server that says less than this is not one whose mode can be trusted.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from treeverify.env import VerifyMode


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LayerCounts(_Strict):
    """Differences of one layer between ours and the baseline, over all validate calls so far (see ``counters``)."""

    layer: int = Field(ge=0)
    calls: int = Field(ge=0)
    rows: int = Field(ge=0, description="(node, head) rows compared; rows that pad a CUDA graph are left out")
    mismatched_rows: int = Field(ge=0, description="rows where NaN or infinity are in one result only")
    max_abs: float = Field(ge=0)
    max_row_ulp: float = Field(ge=0, description="largest difference in bf16 ULP of its row's largest value")
    max_relative: float = Field(ge=0, description="largest |ours - baseline| norm over |baseline| norm of a row")
    worst_node: int = Field(ge=-1, description="node of the row with max_row_ulp; -1: none yet")
    worst_head: int = Field(ge=-1, description="its head, counted over this rank's heads; -1: none yet")
    histogram: list[int] = Field(description="rows by ULP; edges in integrations.sglang.counters.EDGES")


class ModeCounts(_Strict):
    """Verify passes (one per step, counted at the first layer) served in one mode."""

    calls: int = Field(ge=0)
    rows: int = Field(ge=0)


class Shape(_Strict):
    """A shape of verify call that the host has seen, graph captures included."""

    requests: int = Field(ge=1)
    nodes: int = Field(ge=1)
    heads: int = Field(ge=1)
    mask: str = Field(description="dtype of the mask, or none")
    modes: list[str] = Field(description="modes in which it was run or captured")


class BackendState(_Strict):
    """One attention backend of one rank."""

    kernel: str
    device: str
    heads: int = Field(ge=1)
    nodes: int = Field(ge=1)
    bound_ulp: float = Field(gt=0, description="rows beyond it are breaches")
    breaches: int = Field(ge=0, description="calls with a row beyond the bound or mismatched")
    dumps: int = Field(ge=0, description="calls written to dump files")
    shapes: list[Shape]
    left_to_parent: dict[str, int]
    served: dict[str, ModeCounts] = Field(description="by mode: off, validate, on")
    layers: list[LayerCounts]


class RankState(_Strict):
    """One rank of a data-parallel group."""

    rank: int = Field(ge=0, description="rank within the group")
    pid: int = Field(ge=1, description="process that serves it")
    mode: VerifyMode = Field(strict=False)
    allowed: list[VerifyMode] = Field(strict=False, description="modes that a live switch may choose")
    switches: int = Field(ge=0, description="live switches so far")
    switched_at: int = Field(ge=-1, description="forward step at which the last one took effect; -1: none")
    backends: list[BackendState] = Field(description="empty only where mode off is the only one allowed")


class PluginState(_Strict):
    """The entry ``treeverify`` of one data-parallel group: every rank of it."""

    version: str
    engine: str = Field(description="sglang VERSION, or embedded")
    ranks: list[RankState] = Field(min_length=1)
