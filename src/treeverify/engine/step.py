"""One step of a batch: draft, tree, verify, accept, commit; and the prefill that comes before the first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from treeverify.engine.budget import WidthPolicy
from treeverify.engine.cache import Cache, to_device
from treeverify.engine.logprobs import note_logprobs
from treeverify.engine.metrics import Metrics
from treeverify.engine.protocols import Drafter, Target
from treeverify.engine.randomness import uniforms
from treeverify.engine.request import DraftMode, Request
from treeverify.engine.verify import VerifyAttention, VerifyBatch
from treeverify.errors import ContractError
from treeverify.tree.accept import Acceptance, accept
from treeverify.tree.build import ScoredTree, build_scored, top_candidates
from treeverify.tree.law import RowParams, sample, target_law_rows
from treeverify.tree.packing import pack_rows
from treeverify.tree.topology import Tree
from treeverify.tree.visibility import visibility

Ints = NDArray[np.int64]
_ROOT_ALONE = np.array([-1], dtype=np.int32)
_ROOT_SCORE = np.zeros(1, dtype=np.float32)
_ROOT_PATH = np.array([0], dtype=np.int32)


@dataclass(frozen=True)
class Prefix:
    """The committed slots of a batch: indptr int64 [batch + 1], indices int64 [indptr[-1]], on the model's device."""

    lengths: list[int]
    indptr: torch.Tensor
    indices: torch.Tensor


class Stepper:
    """Runs forwards for requests that already own the slots they need; knows nothing of queues."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        cache: Cache,
        attention: VerifyAttention,
        metrics: Metrics,
        policy: WidthPolicy | None = None,
    ) -> None:
        """All state is the cache's, the requests', the metrics' and the policy's."""
        self._target, self._drafter, self._cache = target, drafter, cache
        self._attention, self._metrics, self._policy = attention, metrics, policy
        self._device = target.device

    def prefill(self, request: Request, limit: int) -> list[int]:
        """Commit up to ``limit`` more tokens as a causal chain; the last chunk starts decoding.

        Returns the first new token when the prompt is done, [] before that and after a retraction.
        """
        begin, goal = request.committed, request.prefill_goal
        end = min(goal, begin + limit)
        ids, slots = self._to(request.ids[begin:end].copy()), self._to(request.slots[begin:end].copy())
        positions = torch.arange(begin, end, device=self._device)
        first = end == goal and request.length == request.prompt_length
        prefix = self._prefix([request])
        batch = VerifyBatch(end - begin, prefix.indptr, prefix.indices, None, (request.id,))
        logits, features = self._target.forward(
            ids,
            positions,
            self._cache.layers,
            self._attention.prefill(batch),
            slots=slots,
            rows=torch.tensor([end - begin - 1] if first else [], dtype=torch.int64, device=self._device),
            feature_layers=self._feature_layers([request]),
        )
        # Sampled before anything is recorded: a refusal (NaN logits) leaves the request where it was.
        new = self._sample([request], logits, [np.zeros(1, dtype=np.int32)], [end])[0].tolist() if first else []
        self._write_context(features, slots, positions, [request])
        request.committed, request.decoding = end, end == goal
        self._metrics.prefill_tokens += end - begin
        kept = request.take(new)
        note_logprobs(request, logits, kept)
        return kept

    def decode(self, requests: list[Request]) -> list[list[int]]:
        """One step for decoding requests of one group; returns each one's new tokens (at least one)."""
        stage = self._metrics.stage
        prefix = self._prefix(requests)
        policy = self._policy if requests[0].draft.auto and _can_draft(requests) else None
        context = sum(prefix.lengths) // len(requests)
        with stage("draft"):
            wanted = policy is None or policy.drafts(len(requests), context)
            drafts = self._draft(requests, prefix) if wanted else None
        with stage("tree"):
            scored = [self._tree(r, None if drafts is None else drafts[i]) for i, r in enumerate(requests)]
            trees = [tree.tree for tree in scored]
            if policy is not None and drafts is not None:
                width = policy.choose([tree.scores for tree in scored], context)
                trees = [tree.cut(width) for tree in scored]
        with stage("verify"):
            logits, features, slots = self._verify(requests, trees, prefix)
        with stage("accept"):
            depths = [tree.depths for tree in trees]
            samples = self._sample(requests, logits, depths, [r.length for r in requests])
            accepted = [_accept(*pair) for pair in zip(trees, samples, strict=True)]
            if policy is not None and drafts is not None:
                policy.accepted([len(each.path) - 1 for each in accepted])
        with stage("commit"):
            new = [_new_tokens(r, tree, a) for r, tree, a in zip(requests, trees, accepted, strict=True)]
            self._commit(requests, accepted, features, slots)
        for i, (request, path) in enumerate(zip(requests, accepted, strict=True)):
            if request.top_logprobs is not None:
                note_logprobs(request, logits[i * slots.shape[1] + self._to(path.path.astype(np.int64))], new[i])
        self._count(requests, trees, accepted, new)
        return new

    def _draft(self, requests: list[Request], prefix: Prefix) -> NDArray[np.float32] | None:
        """Draft logits float32 [batch, depth, vocab]; None when no request can use a draft."""
        if self._drafter is None or self._cache.context is None:
            return None
        if not _can_draft(requests):
            return None
        roots = np.array([r.ids[r.length - 1] for r in requests], dtype=np.int64)
        lengths, context_slots = None, prefix.indices[None]
        if len(requests) > 1:
            longest = max(prefix.lengths)
            padded = np.stack([np.resize(r.slots[: r.committed], longest) for r in requests])
            context_slots = self._to(padded)
            if min(prefix.lengths) < longest:
                lengths = self._to(np.array(prefix.lengths))
        starts = self._to(np.array(prefix.lengths))
        return self._drafter.draft(self._cache.context, self._to(roots), starts, context_slots, lengths).cpu().numpy()

    def _tree(self, request: Request, logits: NDArray[np.float32] | None) -> ScoredTree:
        """The request's widest tree; no deeper than its remaining tokens can use (the last one is always a bonus)."""
        root = int(request.ids[request.length - 1])
        depth = request.remaining - 1
        budget = request.step_width - 1
        if logits is None or budget == 0 or depth == 0:
            return ScoredTree(Tree(np.array([root], dtype=np.int64), _ROOT_ALONE), _ROOT_SCORE)
        candidates = top_candidates(logits[:depth], 1 if request.draft.mode is DraftMode.CHAIN else budget)
        return build_scored(root, candidates, budget)

    def _verify(
        self, requests: list[Request], trees: list[Tree], prefix: Prefix
    ) -> tuple[torch.Tensor, torch.Tensor, Ints]:
        """Logits [batch * nodes, vocab], features [batch * nodes, any], slots int64 [batch, nodes] of one forward.

        Trees narrower than the widest are padded with nodes that repeat the root, see only themselves (and the prefix),
        use the request's own reserved slots, and are nobody's child. Chains of one length need no mask.
        """
        nodes = max(tree.width for tree in trees)
        ids = np.empty((len(trees), nodes), dtype=np.int64)
        positions, slots = np.empty_like(ids), np.empty_like(ids)
        for i, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            ids[i], positions[i] = tree.tokens[0], request.committed
            ids[i, : tree.width] = tree.tokens
            positions[i, : tree.width] += tree.depths
            slots[i] = request.slots[request.committed : request.committed + nodes]
        bits = None if all(tree.is_chain and tree.width == nodes for tree in trees) else self._to(_pack(trees, nodes))
        batch = VerifyBatch(nodes, prefix.indptr, prefix.indices, bits, tuple(r.id for r in requests))
        logits, features = self._target.forward(
            self._to(ids.reshape(-1)),
            self._to(positions.reshape(-1)),
            self._cache.layers,
            self._attention.verify(batch),
            slots=self._to(slots.reshape(-1)),
            feature_layers=self._feature_layers(requests),
        )
        return logits, features, slots

    def _sample(
        self, requests: list[Request], logits: torch.Tensor, depths: list[NDArray[np.int32]], starts: list[int]
    ) -> list[Ints]:
        """One target sample per node, int64 [width] per request, from logits float32 [batch * nodes, vocab].

        A node at depth d samples the token of position start + d with that position's random number.
        """
        peak, best = logits.max(-1)  # the first of equal logits, as the greedy law has it
        greedy: Ints = best.cpu().numpy().reshape(len(requests), -1)
        finite = torch.isfinite(peak).cpu().numpy().reshape(greedy.shape)
        if not finite.all():
            row, node = (int(i) for i in np.argwhere(~finite)[0])
            place = f"logits: request {requests[row].id}, node {node}, token id {greedy[row, node]}"
            raise ContractError.of("verify", place, "finite or -inf, not all -inf", "NaN, inf or only -inf")
        samples = [greedy[i, : len(depth)] for i, depth in enumerate(depths)]
        drawing = [i for i, request in enumerate(requests) if not request.params.law.greedy]
        if not drawing:
            return samples
        nodes = greedy.shape[1]
        rows = np.concatenate([i * nodes + np.arange(len(depths[i])) for i in drawing])
        chosen = logits[self._to(rows)].cpu().numpy()
        widths = [len(depths[i]) for i in drawing]
        laws = target_law_rows(chosen, RowParams.of([requests[i].params.law for i in drawing], widths))
        numbers = [uniforms(requests[i].seed, starts[i], int(depths[i].max()) + 1)[depths[i]] for i in drawing]
        drawn = np.split(sample(laws, np.concatenate(numbers)), np.cumsum(widths)[:-1])
        for i, values in zip(drawing, drawn, strict=True):
            samples[i] = values
        return samples

    def _commit(self, requests: list[Request], accepted: list[Acceptance], features: torch.Tensor, slots: Ints) -> None:
        """Keep the accepted rows of requests that go on; those that ended are about to give everything back."""
        going = [i for i, request in enumerate(requests) if request.finish is None]
        if not going:
            return
        paths = [accepted[i].path for i in going]
        self._metrics.moved_rows += self._cache.commit(paths, [slots[i] for i in going])
        nodes = slots.shape[1]
        rows = np.concatenate([i * nodes + path for i, path in zip(going, paths, strict=True)])
        front = np.concatenate([slots[i, : len(path)] for i, path in zip(going, paths, strict=True)])
        positions = np.concatenate(
            [
                np.arange(requests[i].committed, requests[i].committed + len(path))
                for i, path in zip(going, paths, strict=True)
            ]
        )
        if self._feature_layers(requests):
            kept = features[self._to(rows)]
            self._write_context(kept, self._to(front), self._to(positions), requests)
        for i, path in zip(going, paths, strict=True):
            requests[i].committed += len(path)

    def _write_context(
        self, features: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, requests: list[Request]
    ) -> None:
        if self._drafter is not None and self._cache.context is not None and self._feature_layers(requests):
            self._drafter.write(self._cache.context, slots, features, positions)

    def _feature_layers(self, requests: list[Request]) -> tuple[int, ...]:
        """The layers whose features a draft will need; none when no request drafts."""
        if self._drafter is None or all(request.width == 1 for request in requests):
            return ()
        return self._drafter.feature_layers

    def _prefix(self, requests: list[Request]) -> Prefix:
        lengths = [request.committed for request in requests]
        indptr = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=indptr[1:])
        indices = np.concatenate([request.slots[: request.committed] for request in requests])
        return Prefix(lengths, self._to(indptr), self._to(indices))

    def _count(
        self, requests: list[Request], trees: list[Tree], accepted: list[Acceptance], new: list[list[int]]
    ) -> None:
        metrics = self._metrics
        metrics.steps += 1
        metrics.request_steps += len(trees)
        metrics.nodes += sum(tree.width for tree in trees)
        metrics.widths.update(tree.width for tree in trees)
        metrics.acceptance.update(len(tokens) for tokens in new)
        if metrics.observer is not None:
            for request, tree, path in zip(requests, trees, accepted, strict=True):
                metrics.observer(request.id, tree, path)

    def _to(self, array: Ints) -> torch.Tensor:
        return to_device(array, self._device)


def _can_draft(requests: list[Request]) -> bool:
    """Whether a draft could gain one of them anything: it has slots for it, and more than one token to come."""
    return any(request.step_width > 1 and request.remaining > 1 for request in requests)


def _accept(tree: Tree, samples: Ints) -> Acceptance:
    return Acceptance(_ROOT_PATH, int(samples[0])) if tree.width == 1 else accept(tree, samples)


def _new_tokens(request: Request, tree: Tree, accepted: Acceptance) -> list[int]:
    """The step's tokens, cut at a stop token or at max_new_tokens wherever in the path that falls."""
    kept = request.take(accepted.new_tokens(tree).tolist())
    request.acceptance_lengths.append(len(kept))
    return kept


def _pack(trees: list[Tree], nodes: int) -> Ints:
    """Visibility words int64 [batch, nodes, words]; a padding node sees itself only."""
    masks = np.zeros((len(trees), nodes, nodes), dtype=np.bool_)
    masks[:, np.arange(nodes), np.arange(nodes)] = True
    for mask, tree in zip(masks, trees, strict=True):
        mask[: tree.width, : tree.width] = visibility(tree)
    return pack_rows(masks).view(np.int64)
