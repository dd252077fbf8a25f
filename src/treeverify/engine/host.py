"""The embedded engine as the host of a step: a batch of its requests, its models, its cache and its verify modes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from treeverify.engine.budget import WidthPolicy
from treeverify.engine.cache import Cache, Ints, to_device
from treeverify.engine.logprobs import note_logprobs
from treeverify.engine.metrics import Metrics
from treeverify.engine.protocols import Drafter, Target
from treeverify.engine.request import DraftMode, Request
from treeverify.engine.verify import VerifyAttention, VerifyBatch
from treeverify.errors import ContractError
from treeverify.ops.draft_topk.api import draft_topk
from treeverify.ops.draft_window.contract import DraftWindow
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.kv_compact.contract import PoolTable
from treeverify.ops.tree_accept.contract import LawTensors
from treeverify.ops.tree_build.api import tree_build
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.ops.tree_mask.contract import TreeMasks
from treeverify.step.host import Outcome, Verified
from treeverify.step.window import Window
from treeverify.tree.accept import Acceptance
from treeverify.tree.topology import Tree

_FLOAT32 = torch.finfo(torch.float32)
_NO_TOP_K = 1 << 30
_ROOT_ALONE = np.array([-1], dtype=np.int32)


@dataclass(frozen=True)
class Batch:
    """Requests of one group in a step; ``policy`` chooses its width, None: the requests' own."""

    requests: list[Request]
    policy: WidthPolicy | None = None

    @cached_property
    def lengths(self) -> list[int]:
        """Committed tokens of each."""
        return [request.committed for request in self.requests]

    @property
    def context(self) -> int:
        """Their mean."""
        return sum(self.lengths) // len(self.lengths)

    @property
    def drafts(self) -> bool:
        """Whether a draft could gain one of them anything: it has slots for it, and more than one token to come."""
        return any(request.step_width > 1 and request.remaining > 1 for request in self.requests)


class EngineHost:
    """Serves the steps of one engine; what it returns of a step is each request's new tokens."""

    def __init__(
        self, target: Target, drafter: Drafter | None, cache: Cache, attention: VerifyAttention, metrics: Metrics
    ) -> None:
        """All state is the cache's, the requests' and the metrics'."""
        self.target, self.drafter, self.cache = target, drafter, cache
        self.attention, self.metrics = attention, metrics
        self.device = target.device

    def open(self, batch: Batch, drafts: bool) -> Window:
        """The slots that the requests own beyond their committed tokens, and their roots."""
        width = batch.requests[0].step_width if drafts else 1
        slots = np.stack([r.slots[r.committed : r.committed + width] for r in batch.requests])
        roots = np.array([[r.ids[r.length - 1]] for r in batch.requests], dtype=np.int64)
        bounds = torch.tensor(batch.lengths, dtype=torch.int32)
        lengths, window = bounds.long().to(self.device), self.put(slots)
        block = DraftWindow(window, window[:, :1].contiguous(), self.put(roots), lengths.unsqueeze(1))
        return Window(window, lengths, bounds, sum(batch.lengths), block)

    def draft(self, batch: Batch, window: Window) -> DraftTrees:
        """Trees as wide as the group's requests may use.

        None is deeper than its request's remaining tokens can use (the last one is always a bonus); a chain has one
        candidate at each depth.
        """
        budget = window.slots.shape[1] - 1
        chains = [request.draft.mode is DraftMode.CHAIN for request in batch.requests]
        ranked = draft_topk(self.draft_logits(batch, window), 1 if all(chains) else budget)
        for row, (request, chain) in enumerate(zip(batch.requests, chains, strict=True)):
            ranked.log_probs[row, request.remaining - 1 :] = -torch.inf
            if chain:
                ranked.log_probs[row, :, 1:] = -torch.inf
        return tree_build(ranked.log_probs, ranked.token_ids, window.block.ids[:, 0].contiguous(), budget=budget)

    def draft_logits(self, batch: Batch, window: Window) -> torch.Tensor:
        """What the drafter gives after the roots: float32 ``[batch, depth, vocab]``."""
        assert self.drafter is not None
        assert self.cache.context is not None
        longest = max(batch.lengths)
        padded = np.stack([np.resize(r.slots[: r.committed], longest) for r in batch.requests])
        lengths = window.lengths if min(batch.lengths) < longest else None
        return self.drafter.draft(self.cache.context, window.block.ids[:, 0], window.lengths, self.put(padded), lengths)

    def width(self, batch: Batch, trees: DraftTrees) -> int:
        """As wide as the widest tree, or as the policy says."""
        widths: list[int] = trees.widths.tolist()
        if batch.policy is None:
            return max(widths)
        scores = trees.scores.cpu().numpy()
        chosen = batch.policy.choose([row[:width] for row, width in zip(scores, widths, strict=True)], batch.context)
        return min(chosen, max(widths))

    def masks(self, window: Window, width: int) -> TreeMasks:
        """Bits for ``tree_attention``; a root alone needs none."""
        if width == 1:
            return TreeMasks()
        return TreeMasks(bits=TreeMasks.empty(len(window.slots), width, self.device).bits)

    def verify(self, batch: Batch, window: Window, ids: torch.Tensor, masks: TreeMasks) -> Verified:
        """One forward of the target, its attention as the verify mode says.

        Raises ContractError that names the request and node for logits that nothing can be drawn from.
        """
        assert masks.positions is not None
        call = self.call(batch, ids.shape[1], masks.bits)
        layers = self.feature_layers(batch)
        logits, features = self.target.forward(
            ids.reshape(-1),
            masks.positions,
            self.cache.layers,
            self.attention.verify(call),
            slots=window.slots.reshape(-1),
            feature_layers=layers,
        )
        check_logits(batch, logits)
        return Verified(logits, features if layers else None, None)

    def law(self, batch: Batch) -> LawTensors | None:
        """The requests' sampling parameters, as near as float32 has them."""
        laws = [request.params.law for request in batch.requests]
        if all(law.greedy for law in laws):
            return None
        top_k = [_NO_TOP_K if law.top_k is None else min(law.top_k, _NO_TOP_K) for law in laws]
        return LawTensors(
            temperature=torch.tensor([law.temperature for law in laws]).clamp(max=_FLOAT32.max).to(self.device),
            top_k=torch.tensor(top_k, dtype=torch.int32).to(self.device),
            top_p=torch.tensor([law.top_p for law in laws]).clamp(min=_FLOAT32.tiny).to(self.device),
            min_p=torch.tensor([law.min_p for law in laws]).to(self.device),
        )

    def seeds(self, batch: Batch) -> torch.Tensor:
        """The requests' own."""
        return torch.tensor([request.seed for request in batch.requests]).to(self.device)

    def pools(self) -> PoolTable:
        """The layers of the cache."""
        return PoolTable.of(self.cache.layers)

    def append(self, rows: Gathered) -> None:
        """Context rows of the drafter, under the target's slots."""
        self.write_context(rows.features.flatten(0, 1), rows.slots.flatten(), rows.positions.flatten())

    def result(self, batch: Batch, outcome: Outcome) -> list[list[int]]:
        """Give each request its tokens, and count; returns what each has kept of them (at least one)."""
        accepted = outcome.accepted
        lengths, paths, tokens = accepted.lengths.tolist(), accepted.path.tolist(), accepted.new_tokens.tolist()
        trees = [_tree(request, outcome.trees, row) for row, request in enumerate(batch.requests)]
        if batch.policy is not None and outcome.trees is not None:
            batch.policy.accepted([length - 1 for length in lengths])
        new = []
        for row, (request, length) in enumerate(zip(batch.requests, lengths, strict=True)):
            path = paths[row][:length]
            new.append(request.take(tokens[row][:length]))
            request.acceptance_lengths.append(len(new[-1]))
            request.committed += length
            self.metrics.moved_rows += sum(node != place for place, node in enumerate(path))
            if request.top_logprobs is not None:
                rows = torch.tensor(path, device=self.device) + row * outcome.width
                note_logprobs(request, outcome.verified.logits[rows], new[-1])
        self.metrics.step([tree.width for tree in trees], [len(kept) for kept in new])
        if self.metrics.observer is not None:
            for row, (request, tree) in enumerate(zip(batch.requests, trees, strict=True)):
                path = np.array(paths[row][: lengths[row]], dtype=np.int32)
                self.metrics.observer(request.id, tree, Acceptance(path, tokens[row][lengths[row] - 1]))
        return new

    # -- shared with prefill ------------------------------------------------------------------------------------------

    def call(self, batch: Batch, nodes: int, bits: torch.Tensor | None) -> VerifyBatch:
        """A call of the attention of ``nodes`` tokens each after the committed ones."""
        indptr = np.zeros(len(batch.lengths) + 1, dtype=np.int64)
        np.cumsum(batch.lengths, out=indptr[1:])
        indices = np.concatenate([r.slots[: r.committed] for r in batch.requests])
        names = tuple(request.id for request in batch.requests)
        return VerifyBatch(nodes, self.put(indptr), self.put(indices), bits, names)

    def feature_layers(self, batch: Batch) -> tuple[int, ...]:
        """The layers whose features a draft will need; none when no request drafts."""
        if self.drafter is None or all(request.width == 1 for request in batch.requests):
            return ()
        return self.drafter.feature_layers

    def write_context(self, features: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Context rows of committed tokens."""
        assert self.drafter is not None
        assert self.cache.context is not None
        self.drafter.write(self.cache.context, slots, features, positions)

    def put(self, array: Ints) -> torch.Tensor:
        """The array on the model's device."""
        return to_device(array, self.device)


def check_logits(batch: Batch, logits: torch.Tensor) -> None:
    """Refuse logits ``[batch * nodes, vocab]`` of which a row has no law, by request and node."""
    peak, best = logits.max(-1)
    finite = torch.isfinite(peak).view(len(batch.requests), -1)
    if not bool(finite.all()):
        row, node = (~finite).nonzero()[0].tolist()
        token = int(best.view_as(finite)[row, node])
        place = f"logits: request {batch.requests[row].id}, node {node}, token id {token}"
        raise ContractError.of("verify", place, "finite or -inf, not all -inf", "NaN, inf or only -inf")


def _tree(request: Request, trees: DraftTrees | None, row: int) -> Tree:
    if trees is None:
        return Tree(request.ids[request.length - 1 : request.length].copy(), _ROOT_ALONE)
    width = int(trees.widths[row])
    return Tree(trees.tokens[row, :width].cpu().numpy(), trees.parents[row, :width].cpu().numpy())
