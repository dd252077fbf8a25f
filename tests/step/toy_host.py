"""A host on the exact toy pair, as a server has it: a slot table, flat masks, a drafter without an output head.

Whatever a step leaves that is nobody's is made NaN after it, so that a row read from a wrong place shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tests.toy.models import CONTEXT, LATENT, LAYERS, ROW, VALUES, VOCAB, ToyDrafter, ToyTarget, expected

from treeverify.engine.request import SamplingParams
from treeverify.ops.draft_window.api import draft_window
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.kv_compact.contract import PoolTable
from treeverify.ops.tree_accept.contract import LawTensors
from treeverify.ops.tree_attention.reference import tree_attention_reference
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.ops.tree_mask.contract import TreeMasks
from treeverify.step.draft import Head, TreeDraft
from treeverify.step.host import Outcome, Verified
from treeverify.step.step import Step
from treeverify.step.window import Window

MASK_TOKEN = 0


@dataclass
class Request:
    """A text under way; its last token is the next root."""

    prompt: list[int]
    params: SamplingParams
    text: list[int] = field(default_factory=list)

    @cached_property
    def right(self) -> list[int]:
        """What its text must be."""
        return [*self.prompt, *expected(self.prompt, self.params)]


class ToyHost:
    """Serves batches of `Request`; ``wanted`` nodes are verified of trees of ``width``."""

    device = torch.device("cpu")

    def __init__(self, drafter: ToyDrafter, width: int, block: int = 6) -> None:
        self.target, self.drafter, self.wanted = ToyTarget(), drafter, width
        self.block, self._width = block, width
        columns = CONTEXT + width
        slots = np.random.default_rng(1).permutation(8 * columns)[: 7 * columns] + 1
        self.table = torch.from_numpy(slots.reshape(7, columns)).int()
        self.layers = [torch.full((8 * columns + 1, ROW), torch.nan) for _ in range(LAYERS)]
        self.context = torch.full((8 * columns + 1, 2), torch.nan)
        self.tail = TreeDraft(Head(torch.eye(VOCAB), 0, None), block, width, 2)
        self._outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.events: list[str] = []
        self.outcomes: list[Outcome] = []
        self.published: list[list[int]] = []

    def start(self, requests: list[Request]) -> None:
        """What a prefill leaves: rows of the prompt, and the first token."""
        for row, request in enumerate(requests):
            request.text = request.right[: len(request.prompt) + 1]
            places, slots = np.arange(len(request.prompt)), self.table[row, : len(request.prompt)].long()
            for layer in range(LAYERS):
                self.layers[layer][slots] = 0.0
                self.layers[layer][slots, :LATENT] = torch.from_numpy(VALUES[layer, request.prompt, places])
            self.context[slots] = torch.tensor([request.prompt, places.tolist()]).T.float()

    def run(self, step: Step[Any, Any], requests: list[Request], *, run: int = 0) -> None:
        """One step; ``run`` plain ones if it is not 0."""
        self.events.clear()
        publish = lambda lengths: (self.published.append(lengths.tolist()), self.events.append("publish"))  # noqa: E731
        if run:
            step.plain(requests, run, publish)
        else:
            step.drafted(requests, publish)
        kept = [self.table[row, : len(request.text) - 1].long() for row, request in enumerate(requests)]
        nobodys = torch.ones(len(self.context), dtype=torch.bool)
        nobodys[torch.cat(kept)] = False
        for buffer in (*self.layers, self.context):
            buffer[nobodys] = torch.nan

    def spent(self, stage: str, begin: float) -> float:
        assert begin <= perf_counter()
        self.events.append(f"spent {stage}")
        return perf_counter()

    # -- what a step asks -------------------------------------------------------------------------------------------

    def open(self, batch: list[Request], drafts: bool) -> Window:
        lengths = torch.tensor([len(request.text) - 1 for request in batch])
        block = draft_window(
            torch.arange(len(batch)),
            lengths,
            self.table,
            torch.tensor([request.text[-1] for request in batch]),
            block=self.block if drafts else 1,
            width=self._width,
            mask_token=MASK_TOKEN,
        )
        self.events.append("open")
        return Window(block.slots, lengths, lengths.int(), int(lengths.sum()), block)

    def draft(self, batch: list[Request], window: Window) -> DraftTrees:
        ids, lengths = window.block.ids, window.lengths
        assert (ids[:, 1:] == MASK_TOKEN).all()
        seen = [self.table[row, :length].long() for row, length in enumerate(lengths.tolist())]
        logits = [
            self.drafter.draft(self.context, ids[row, :1], lengths[row : row + 1], slots[None], None)[0]
            for row, slots in enumerate(seen)
        ]
        hidden = torch.cat([torch.nn.functional.pad(each, (0, 0, 1, 0), value=torch.nan) for each in logits])
        self.tail.reserve(len(batch))
        self.tail(hidden, ids.flatten())
        self.events.append("draft")
        return self.tail.trees(len(batch))

    def width(self, batch: list[Request], trees: DraftTrees) -> int:
        return self.wanted

    def masks(self, window: Window, width: int) -> TreeMasks:
        cells = width * (window.bound + self.block * len(window.lengths) + len(window.lengths) * width)
        return TreeMasks(full_mask=torch.ones(cells, dtype=torch.bool))

    def verify(self, batch: list[Request], window: Window, ids: torch.Tensor, masks: TreeMasks) -> Verified:
        lengths, nodes = window.lengths.tolist(), ids.shape[1]
        assert window.slots.shape == ids.shape
        assert (window.bounds >= 0).all()
        indptr = torch.tensor([0, *lengths]).cumsum(0)
        indices = torch.cat([self.table[row, :length].long() for row, length in enumerate(lengths)])
        begins = torch.tensor([0, *(nodes * (length + nodes) for length in lengths)]).cumsum(0)

        def attend(_: int, q: Any, draft_kv: Any, pool: Any) -> Any:
            options = {"nodes": nodes, "scale": 1.0, "mask": masks.full_mask, "mask_indptr": begins}
            return tree_attention_reference(q, draft_kv, pool, indptr, indices, **options, dtype=torch.float32)[0]

        logits, features = self.target.forward(
            ids.flatten(), masks.positions, self.layers, attend, slots=window.slots.flatten()
        )
        self.events.append("verify")
        held = self._outputs.setdefault(len(logits), (logits.clone(), features.clone()))
        for buffer, made in zip(held, (logits, features), strict=True):
            buffer.copy_(made)  # as a graph has it: the next forward of the size overwrites what this one gave
        return Verified(*held, None)

    def law(self, batch: list[Request]) -> LawTensors | None:
        laws = [request.params.law for request in batch]
        if all(law.greedy for law in laws):
            return None
        return LawTensors(
            torch.tensor([law.temperature for law in laws]),
            torch.tensor([law.top_k or 1 << 30 for law in laws], dtype=torch.int32),
            torch.tensor([law.top_p for law in laws]),
            torch.tensor([law.min_p for law in laws]),
        )

    def seeds(self, batch: list[Request]) -> torch.Tensor:
        return torch.tensor([request.params.seed or 0 for request in batch])

    def pools(self) -> PoolTable:
        return PoolTable.of(self.layers)

    def append(self, rows: Gathered) -> None:
        slots = rows.slots.flatten()
        self.drafter.write(self.context, slots, rows.features.flatten(0, 1), rows.positions.flatten())
        self.events.append("append")

    def result(self, batch: list[Request], outcome: Outcome) -> None:
        lengths, tokens = outcome.accepted.lengths.tolist(), outcome.accepted.new_tokens.tolist()
        for request, length, new, bonus in zip(batch, lengths, tokens, outcome.accepted.bonus.tolist(), strict=True):
            assert new[length - 1] == bonus
            request.text += new[:length]
        assert outcome.lengths.tolist() == [len(request.text) - 1 for request in batch]
        self.events.append("result")
        self.outcomes.append(outcome)
