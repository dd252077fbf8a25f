"""The end of a step: graphs of the drafter's KV writes serve smaller batches, and leave nothing of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.tree_accept.contract import Accepted
from treeverify.step.features import Features

WIDTH, COLUMNS, DIM, SLOTS = 6, 4, 5, 200
SIZES = (4, 1, 2)


class Drafter:
    """A drafter's KV that keeps features and positions by slot; slot 0 is nobody's."""

    def __init__(self) -> None:
        self.features, self.positions = torch.full((SLOTS, DIM), torch.nan), torch.full((SLOTS,), -1)
        self.written: list[int] = []

    def append(self, rows: Gathered) -> None:
        slots = rows.slots.flatten()
        self.features[slots], self.positions[slots] = rows.features.flatten(0, 1), rows.positions.flatten()
        self.written.append(len(rows.slots))

    def same(self, other: Drafter) -> bool:
        features, wanted = self.features[1:].view(torch.int32), other.features[1:].view(torch.int32)
        return torch.equal(features, wanted) and torch.equal(self.positions[1:], other.positions[1:])


def as_they_are(calls: Mapping[int, Callable[[], None]]) -> Mapping[int, Callable[[], None]]:
    """Stands for a capture, which runs what it captures."""
    for call in calls.values():
        call()
    return calls


def step(batch: int, seed: int) -> tuple[torch.Tensor, Accepted, torch.Tensor, torch.Tensor]:
    """What a step of ``batch`` requests hands over; what no path names is NaN."""
    random = torch.Generator().manual_seed(seed)
    features = torch.full((batch * WIDTH, DIM), torch.nan)
    accepted = Accepted.empty(batch, WIDTH, COLUMNS - 1, "cpu")
    accepted.path.fill_(-1)
    for request in range(batch):
        length = int(torch.randint(1, COLUMNS + 1, (), generator=random))
        rest = torch.randperm(WIDTH - 1, generator=random)[: length - 1].sort().values + 1
        path = torch.cat([torch.zeros(1, dtype=torch.int64), rest])
        accepted.path[request, :length], accepted.lengths[request] = path.int(), length
        features[request * WIDTH + path] = torch.randn(length, DIM, generator=random)
    slots = torch.randperm(SLOTS - 1, generator=random)[: batch * WIDTH].view(batch, WIDTH) + 1
    return features, accepted, slots, torch.randint(0, 99, (batch,), generator=random)


def test_replays_write_what_a_step_without_a_graph_writes() -> None:
    """Batches that shrink and grow; the drafter's rows change in between, so that a row written again would show."""
    graphed, plain = Drafter(), Drafter()
    with_graphs, without = Features(graphed.append), Features(plain.append)
    for run in (with_graphs, without):
        run(*step(2, 0))
    with_graphs.capture(SIZES, as_they_are)
    assert graphed.same(plain), "a capture wrote to a slot"
    graphed.written.clear()
    for seed, batch in enumerate((4, 1, 3, 2, 4, 5, 3), start=1):
        for drafter in (graphed, plain):
            drafter.features.fill_(torch.nan)
            drafter.positions.fill_(-seed)
        with_graphs(*step(batch, seed))
        without(*step(batch, seed))
        assert graphed.same(plain), batch
        assert not graphed.features[0].isnan().any(), "padding that is not finite"
    assert graphed.written == [4, 1, 4, 2, 4, 5, 4]


def test_buffers_of_graphs_never_move() -> None:
    seen: list[int] = []
    features = Features(lambda rows: seen.append(rows.slots.data_ptr()))
    features(*step(1, 0))
    features.capture(SIZES, as_they_are)
    seen.clear()
    for batch in (4, 1, 2, 3):
        features(*step(batch, batch))
    assert len(set(seen)) == 1
