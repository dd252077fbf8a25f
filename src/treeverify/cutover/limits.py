"""The gates' thresholds, each with its reason (docs/evidence/gates.md has the derivations in full)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from treeverify.observe.bounds import BOUND_ULP, RESULT_ULP


class Limits(BaseModel):
    """Thresholds of one cutover; the defaults are for a server that computes in bfloat16."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = Field(
        default=10_000,
        ge=1,
        description="(node, head) rows that each layer must have compared: ten times what shows a share of 0.001",
    )
    max_row_ulp: float = Field(
        default=BOUND_ULP, gt=0, description="two correct results differ by no more (observe.bounds)"
    )
    usual_ulp: float = Field(
        default=RESULT_ULP, gt=0, description="an edge of the histogram; nearly every row is within it (observe.bounds)"
    )
    share_beyond: float = Field(
        default=0.001,
        ge=0,
        lt=1,
        description="rows of a layer beyond usual_ulp: an eighth of one head's, where a rank has the most heads, 128",
    )
    near_tie: float = Field(
        default=0.25,
        ge=0,
        description="nats: rounding two logits of 16..32 to bfloat16, by up to 1/16 in either mode, moves a gap so far",
    )
    kl: float = Field(
        default=2e-3,
        ge=0,
        description="nats per token; two such roundings make half the variance of their difference, 1.3e-3",
    )
    detectable_kl: float = Field(
        default=0.02, ge=0, description="nats per token; a sample too small or noisy to detect this is not let through"
    )
    logprob: float = Field(
        default=2e-3, ge=0, description="nats per token, in the mean: 0.2 % in perplexity; rounding errors cancel in it"
    )
    top_k: int = Field(default=5, ge=2, description="how many of the likeliest tokens are compared as a set")
    prompts: int = Field(
        default=12, ge=2, description="prompts that statistics need: of fewer, no permutation test can be sure enough"
    )
    alpha: float = Field(
        default=0.01, gt=0, lt=1, description="chance of a false alarm of all statistical gates of one run together"
    )
    looks: int = Field(
        default=2, ge=1, description="times that a run judges statistics (eager, graphs); they share alpha"
    )
    power: float = Field(default=0.8, gt=0, lt=1, description="chance with which a detectable effect is detected")
    speed_ratio: float | None = Field(
        default=0.9,
        gt=0,
        description="least candidate / baseline tokens per second; None: recorded, not judged",
    )
