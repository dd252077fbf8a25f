"""The gates' thresholds, each with its reason."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Thresholds of one cutover; the defaults are for a server that computes in bfloat16."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = Field(default=10_000, ge=1, description="compared (node, head) rows that each layer must have")
    max_row_ulp: float = Field(default=4.0, gt=0)
    share_beyond_one_ulp: float = Field(default=0.001, ge=0, lt=1)
    near_tie: float = Field(default=0.25, ge=0, description="nats")
    kl: float = Field(default=2e-3, ge=0, description="nats per token that two correct kernels may differ by")
    alpha: float = Field(default=0.01, gt=0, lt=1, description="false alarms of all statistical gates of one run")
    looks: int = Field(default=3, ge=1, description="times that a run judges statistics; they share alpha")
    speed_ratio: float | None = Field(default=0.9, gt=0, description="least candidate / baseline; None: record only")
