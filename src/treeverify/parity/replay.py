"""Models that remember what they have computed, so that thousands of draws from few prompts are affordable.

A forward is looked up by *content*: the bytes of the KV rows that the request's own slots hold, its tokens, positions
and visibility words. So everything the engine does to a request still runs for each draw (prefill, draft, tree, slots,
sampling, acceptance, moves at commit); only arithmetic on inputs seen before, bit for bit, is not repeated. A row that
was moved wrongly changes the key and is computed with.

The target learns which slots a call reads from the engine's own seam: it calls ``attend`` once, which in verify mode
``on`` reaches `Replay.implementation` with the batch. What is not remembered runs through the public operator.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass

import torch

from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.protocols import Attend, Drafter, Target
from treeverify.engine.verify import VerifyBatch, ours
from treeverify.env import VerifyMode
from treeverify.errors import ContractError, ParityError


@dataclass(frozen=True)
class _Remembered:
    """One request's part of a forward: logits, features, and the KV rows written, [layers, tokens, 576]."""

    logits: torch.Tensor
    features: torch.Tensor
    rows: torch.Tensor


class ReplayTarget:
    """A `protocols.Target` in front of another."""

    def __init__(self, real: Target) -> None:
        """Start with nothing remembered."""
        self.real, self.scale, self.device = real, real.scale, real.device
        self.computed = self.looked_up = 0  # requests in forwards
        self._memory: dict[bytes, _Remembered] = {}
        self._batch: VerifyBatch | None = None
        self._ours = ours(None)

    @property
    def vocab_size(self) -> int:
        """As the real one's."""
        return self.real.vocab_size

    @property
    def context(self) -> int:
        """As the real one's."""
        return self.real.context

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """As the real one's."""
        return self.real.eos_token_ids

    def new_pool(self, slots: int) -> torch.Tensor:
        """As the real one's."""
        return self.real.new_pool(slots)

    def implementation(
        self, q: torch.Tensor, draft_kv: torch.Tensor, kv_pool: torch.Tensor, batch: VerifyBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the engine takes for its verify attention: it only tells the batch (see `forward`)."""
        self._batch = batch
        return q, q

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
        """As `protocols.Target.forward`; a prefill that begins at position 0, or one verify step."""
        if slots is None:
            raise ParityError("replay: expected a forward that writes its rows, got none to write to")
        if rows is not None:
            return self._prefill(ids, positions, kv, attend, slots, rows, feature_layers)
        self._batch = None
        with suppress(ContractError):  # a real attention refuses the call, and tells no batch
            attend(-1, ids, ids, ids)
        if self._batch is None:
            raise ParityError("replay: expected an engine in verify mode on with this target's implementation")
        return self._verify(ids, positions, kv, self._batch, slots, feature_layers)

    def _prefill(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        kv: list[torch.Tensor],
        attend: Attend,
        slots: torch.Tensor,
        rows: torch.Tensor,
        feature_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if int(positions[0]) != 0:
            raise ParityError("replay: expected prompts that are prefilled in one piece")
        key = _digest(ids, rows, torch.tensor(feature_layers))
        found = self._memory.get(key)
        if found is None:
            self.computed += 1
            out = self.real.forward(ids, positions, kv, attend, slots=slots, rows=rows, feature_layers=feature_layers)
            found = self._memory[key] = _Remembered(*out, torch.stack([layer[slots] for layer in kv]))
        else:
            self.looked_up += 1
            for layer, values in zip(kv, found.rows, strict=True):
                layer.index_copy_(0, slots, values)
        return found.logits, found.features

    def _verify(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        kv: list[torch.Tensor],
        batch: VerifyBatch,
        slots: torch.Tensor,
        feature_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nodes, count = batch.nodes, len(batch.request_ids)
        ends: list[int] = batch.kv_indptr.tolist()
        prefix = torch.stack([layer[batch.kv_indices] for layer in kv], 1)  # [sum of prefixes, layers, 576]
        keys, layers = [], torch.tensor(feature_layers)
        for i in range(count):
            own = slice(i * nodes, (i + 1) * nodes)
            bits = ids[:0] if batch.tree_bits is None else batch.tree_bits[i]
            keys.append(_digest(prefix[ends[i] : ends[i + 1]], ids[own], positions[own], bits, layers))
        missing = list({key: i for i, key in enumerate(keys) if key not in self._memory}.values())
        if missing:
            self._compute(missing, keys, ids, positions, kv, batch, slots, feature_layers)
        self.computed += len(missing)
        self.looked_up += count - len(missing)
        found = [self._memory[key] for key in keys]
        for index, layer in enumerate(kv):
            layer.index_copy_(0, slots, torch.cat([part.rows[index] for part in found]))
        return torch.cat([part.logits for part in found]), torch.cat([part.features for part in found])

    def _compute(
        self,
        missing: list[int],
        keys: list[bytes],
        ids: torch.Tensor,
        positions: torch.Tensor,
        kv: list[torch.Tensor],
        batch: VerifyBatch,
        slots: torch.Tensor,
        feature_layers: tuple[int, ...],
    ) -> None:
        """Run the requests ``missing`` of a verify call and remember their parts."""
        nodes = batch.nodes
        chosen = torch.tensor(missing)
        tokens = (chosen[:, None] * nodes + torch.arange(nodes)).flatten()
        lengths = batch.kv_indptr.diff()[chosen]
        ends: list[int] = batch.kv_indptr.tolist()
        part = VerifyBatch(
            nodes,
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            torch.cat([batch.kv_indices[ends[i] : ends[i + 1]] for i in missing]),
            None if batch.tree_bits is None else batch.tree_bits[chosen],
            tuple(batch.request_ids[i] for i in missing),
        )
        logits, features = self.real.forward(
            ids[tokens],
            positions[tokens],
            kv,
            lambda layer, q, draft_kv, kv_pool: self._ours(q, draft_kv, kv_pool, part, self.scale)[0],
            slots=slots[tokens],
            feature_layers=feature_layers,
        )
        written = torch.stack([layer[slots[tokens]] for layer in kv])
        for place, i in enumerate(missing):
            own = slice(place * nodes, (place + 1) * nodes)
            self._memory[keys[i]] = _Remembered(
                logits[own].clone(), features[own].clone(), written[:, own].contiguous()
            )


class ReplayDrafter:
    """A `protocols.Drafter` in front of another; drafts and context rows are looked up by content."""

    def __init__(self, real: Drafter) -> None:
        """Start with nothing remembered."""
        self.real, self.depth, self.feature_layers = real, real.depth, real.feature_layers
        self._drafts: dict[bytes, torch.Tensor] = {}
        self._rows: dict[bytes, torch.Tensor] = {}

    def new_pool(self, slots: int) -> torch.Tensor:
        """As the real one's."""
        return self.real.new_pool(slots)

    def write(self, pool: torch.Tensor, slots: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> None:
        """As `protocols.Drafter.write`."""
        keys = [_digest(feature, position) for feature, position in zip(features, positions, strict=True)]
        if missing := [i for i, key in enumerate(keys) if key not in self._rows]:
            chosen = torch.tensor(missing)
            self.real.write(pool, slots[chosen], features[chosen], positions[chosen])
            for i, row in zip(missing, pool[slots[chosen]], strict=True):
                self._rows[keys[i]] = row.clone()
        pool.index_copy_(0, slots, torch.stack([self._rows[key] for key in keys]))

    def draft(
        self,
        pool: torch.Tensor,
        roots: torch.Tensor,
        starts: torch.Tensor,
        context_slots: torch.Tensor,
        lengths: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `protocols.Drafter.draft`; what is not remembered is drafted one request at a time."""
        counts = [context_slots.shape[1]] * len(roots) if lengths is None else lengths.tolist()
        drafts = []
        for i, count in enumerate(counts):
            used = context_slots[i, :count]
            key = _digest(pool[used], roots[i], starts[i])
            if key not in self._drafts:
                one = slice(i, i + 1)
                self._drafts[key] = self.real.draft(pool, roots[one], starts[one], used[None], None)[0].clone()
            drafts.append(self._drafts[key])
        return torch.stack(drafts)


class Replay:
    """A target and a drafter that remember, and engines over them; the memory outlives each engine."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        """Wrap both."""
        self.target, self.drafter = ReplayTarget(target), ReplayDrafter(drafter)

    def engine(self, slots: int, max_batch: int) -> Engine:
        """A new engine, verify mode on."""
        config = EngineConfig(slots=slots, max_batch=max_batch, verify=VerifyMode.ON)
        return Engine(self.target, self.drafter, config=config, mine=self.target.implementation)


def _digest(*tensors: torch.Tensor) -> bytes:
    """A key of the tensors' bytes and sizes."""
    made = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        made.update(tensor.numel().to_bytes(8, "little"))
        made.update(tensor.numpy().tobytes())
    return made.digest()
