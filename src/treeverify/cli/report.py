"""What the demo measured, as data: the terminal view, the page and `--json` are all made from it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base of the report's parts: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModeRun(Frozen):
    """One way of decoding the same prompts.

    ``acceptance_length``: committed tokens per verify step (root counted). ``seconds``: decoding only, prefill left
    out. ``histogram[i]``: steps that committed ``i + 1`` tokens. ``same_tokens``: equal to plain decoding, None for
    plain itself.
    """

    draft: str
    budget: int | str  # auto: by cost
    tokens: int
    steps: int
    seconds: float
    acceptance_length: float
    histogram: list[int]
    same_tokens: bool | None

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens over decoding seconds."""
        return self.tokens / self.seconds


class DrawnStep(Frozen):
    """One verify step: the draft tree, node 0 being the root, with its accepted path and the bonus token."""

    tokens: list[str]
    parents: list[int]
    path: list[int]
    bonus: str


class PromptView(Frozen):
    """One prompt and its continuation, cut into the pieces that each verify step committed."""

    name: str
    prompt: str
    pieces: list[list[str]]


class ValidateView(Frozen):
    """Record of a run with ``KDTREE_VERIFY=validate``: baseline against ours on the live tensors."""

    calls: int
    rows: int
    max_abs: float
    max_relative: float
    max_ulp: float
    worst: str
    same_tokens: bool


class DemoReport(Frozen):
    """Everything that ``treeverify demo`` shows."""

    model: str
    device: str
    dtype: str
    prompts: int
    new_tokens: int
    runs: list[ModeRun]
    step: DrawnStep
    view: PromptView
    validate_run: ValidateView
