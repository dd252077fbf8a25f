"""What the engine asks of a target and of a drafter; ``models`` implements both, and so does the tests' toy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q [tokens, heads, 576], draft_kv [tokens, 576], kv_pool [slots, 576]) -> [tokens, heads, 512]."""


class Target(Protocol):
    """A model whose KV rows live in a paged pool and whose attention is passed in."""

    scale: float
    device: torch.device

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1."""

    @property
    def context(self) -> int:
        """Positions are 0 .. context - 1."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, possibly none."""

    def new_pool(self, slots: int) -> torch.Tensor:
        """Uninitialised KV rows [layers, slots, 576]."""

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        kv: list[torch.Tensor],
        attend: Attend,
        *,
        slots: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits float32 [rows, vocab] and features [tokens, any]; KV rows are written to ``slots`` on the way."""


class Drafter(Protocol):
    """A block drafter: one context row per committed token, one forward per draft."""

    depth: int
    feature_layers: tuple[int, ...]

    def new_pool(self, slots: int) -> torch.Tensor:
        """Uninitialised context rows [slots, ...], indexed by the target pool's slots."""

    def write(self, pool: torch.Tensor, slots: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the context rows of committed tokens: slots, positions int64 [tokens], features [tokens, any]."""

    def draft(
        self,
        pool: torch.Tensor,
        roots: torch.Tensor,
        starts: torch.Tensor,
        context_slots: torch.Tensor,
        lengths: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits float32 [batch, depth, vocab] of the tokens after roots [batch] at positions starts [batch].

        context_slots int64 [batch, longest]; the first lengths [batch] of each row count (None: all of them do).
        """


class Tokenizer(Protocol):
    """Text to ids and back; the engine itself only hands it out."""

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
