"""kv_compact against kvpool's plan, feature_gather against indexing. Covers F5, F19 of the field faults."""

from __future__ import annotations

import numpy as np
import torch
from tree_cases import GUARD_BYTE, Buffers, equal

from treeverify.kvpool.plan import plan_batch_moves
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.kv_compact.contract import PoolTable

SLOTS = 3000


def random_paths(
    random: np.random.Generator, batch: int, width: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rising paths from 0, the identity and the root alone among them; what follows a path is junk."""
    path = torch.from_numpy(random.integers(-5, 400, (batch, columns))).int()
    lengths = []
    for request in range(batch):
        longest = min(columns, width)
        length = (int(random.integers(1, longest + 1)), longest, 1)[request % 3]
        rest = np.sort(random.choice(np.arange(1, width), length - 1, replace=False)) if length > 1 else []
        if request % 4 == 1:
            rest = np.arange(1, length)
        path[request, :length] = torch.tensor([0, *rest], dtype=torch.int32)
        lengths.append(length)
    return path, torch.tensor(lengths, dtype=torch.int32)


def random_slots(random: np.random.Generator, batch: int, width: int) -> torch.Tensor:
    return torch.from_numpy(random.permutation(SLOTS - 1)[: batch * width].reshape(batch, width) + 1)


def hostile_pools(random: np.random.Generator, device, layers: int, dtype: torch.dtype, dim: int, gap: int):
    """Pools of any bytes (NaN and infinity among them), their rows ``gap`` bytes apart; also all of their memory."""
    row = dim * torch.empty((), dtype=dtype).element_size()
    memory = torch.from_numpy(random.integers(0, 256, (layers, SLOTS, row + gap), dtype=np.uint8)).to(device)
    pools = [
        layer.view(-1).view(dtype).as_strided((SLOTS, 1, dim), ((row + gap) // dtype.itemsize, dim, 1))
        for layer in memory
    ]
    return memory, pools


def compacts(ops, slots, path, lengths, *, layers=3, dtype=torch.bfloat16, dim=72, gap=0, seed=0) -> None:
    """Against a plan of kvpool, carried out by one gather and scatter; every byte of the pools counts."""
    random = np.random.default_rng(seed)
    memory, pools = hostile_pools(random, ops.device, layers, dtype, dim, gap)
    kept = memory.cpu().clone()
    table = PoolTable.of(pools)
    ops.kv_compact(table, *(tensor.to(ops.device) for tensor in (slots, path, lengths)))
    live = [node[:length].numpy() for node, length in zip(path, lengths.tolist(), strict=True)]
    plan = plan_batch_moves(live, [row.numpy() for row in slots])
    row = dim * dtype.itemsize
    for layer in kept:
        layer[plan.destinations.copy(), :row] = layer[plan.sources.copy(), :row]
    equal("pools", memory, kept)


def random_commits(ops) -> None:
    random = np.random.default_rng(0)
    for batch, width, columns in ((1, 1, 1), (1, 33, 8), (5, 33, 17), (3, 9, 9), (4, 257, 33), (7, 65, 16), (2, 5, 40)):
        path, lengths = random_paths(random, batch, width, columns)
        slots = random_slots(random, batch, width)
        compacts(ops, slots, path, lengths, seed=width)
        compacts(ops, slots.int(), path, lengths, seed=width)


def row_sizes(ops) -> None:
    """Units of 16, 4 and 1 bytes, one and many blocks, gaps between rows."""
    random = np.random.default_rng(1)
    path, lengths = random_paths(random, 3, 33, 12)
    slots = random_slots(random, 3, 33)
    shapes = (
        (torch.bfloat16, 576, 0), (torch.uint8, 656, 0), (torch.uint8, 584, 0), (torch.float32, 9, 12),
        (torch.bfloat16, 3, 0), (torch.uint8, 1, 0), (torch.uint8, 7, 9), (torch.bfloat16, 8, 16),
    )  # fmt: skip
    for dtype, dim, gap in shapes:
        for layers in (1, 2, 5):
            compacts(ops, slots, path, lengths, layers=layers, dtype=dtype, dim=dim, gap=gap)


def field_cases(ops) -> None:
    """F5: path [0, 3, 9, 17] of a 33-node tree; F19: [1, 2, 4] onto [0, 1, 2] and a whole chain's shift, repeated."""
    random = np.random.default_rng(2)
    slots = random_slots(random, 1, 33)
    for nodes in ([0, 3, 9, 17], [0, 1, 2, 4], [0, 2, 3, 5], [0, *range(2, 33)], list(range(33)), [0]):
        path = torch.tensor([nodes], dtype=torch.int32)
        for repeat in range(5):
            compacts(ops, slots, path, torch.tensor([len(nodes)], dtype=torch.int32), layers=4, seed=repeat)
    rising = torch.arange(33).view(1, 33) + 5  # contiguous slots: sources and destinations overlap in memory
    path = torch.tensor([[0, *range(2, 33)]], dtype=torch.int32)
    compacts(ops, rising, path, torch.tensor([32], dtype=torch.int32))
    compacts(ops, rising.flip(1).contiguous(), path, torch.tensor([32], dtype=torch.int32))


def padded_requests(ops) -> None:
    """Requests whose slots are all the dummy slot, with junk paths: no byte moves but those of live requests."""
    random = np.random.default_rng(3)
    path, lengths = random_paths(random, 2, 9, 6)
    slots = random_slots(random, 2, 9)
    memory, pools = hostile_pools(random, ops.device, 2, torch.bfloat16, 72, 0)
    kept = memory.cpu().clone()
    plan = plan_batch_moves([path[i, : int(lengths[i])].numpy() for i in range(2)], [row.numpy() for row in slots])
    for layer in kept:
        layer[plan.destinations.copy()] = layer[plan.sources.copy()]
    padded_slots = torch.cat([slots, torch.zeros(2, 9, dtype=slots.dtype)])
    junk = torch.tensor([[0, 4, 8, -1, -1, -1], [0, 1, 2, 3, 4, 5]], dtype=torch.int32)
    padded_path, padded_lengths = torch.cat([path, junk]), torch.cat([lengths, torch.tensor([3, 6], dtype=torch.int32)])
    ops.kv_compact(PoolTable.of(pools), *(t.to(ops.device) for t in (padded_slots, padded_path, padded_lengths)))
    equal("pools", memory, kept)
    if ops.name == "cpu":
        return  # refuses paths that break the contract
    broken = torch.tensor([[1, 2, 3, 4, 5, 6], [-1, 5, 2, 9, 9, 9], [5, 0, 1, 2, 3, 4], [9, 10, 2**31 - 1, 0, 0, 0]])
    counts = torch.tensor([6, 2**31 - 1, -3, 6], dtype=torch.int32)
    ops.kv_compact(PoolTable.of(pools), *(t.to(ops.device) for t in (padded_slots, broken.int(), counts)))
    equal("pools", memory, kept)


def gathers(ops) -> None:
    random = np.random.default_rng(4)
    shapes = ((1, 1, 1, 8), (3, 33, 17, 1), (5, 9, 12, 7), (2, 65, 16, 9000), (4, 257, 9, 64))
    for batch, width, columns, dim in shapes:
        for dtype, gap in ((torch.bfloat16, 0), (torch.float32, 3), (torch.float16, 8)):
            path, lengths = random_paths(random, batch, width, columns)
            slots = random_slots(random, batch, width)
            prefixes = torch.from_numpy(random.integers(0, 10**6, batch))
            wide = torch.from_numpy(random.normal(0, 1, (batch * width, dim + gap))).to(dtype)
            wide[:, dim:] = torch.nan
            used = torch.zeros(batch, width, dtype=torch.bool)
            for request, length in enumerate(lengths.tolist()):
                used[request, path[request, :length].long()] = True
            wide[~used.view(-1)] = torch.nan  # rows that are not accepted
            buffers = Buffers(ops.device)
            out = buffers.like(Gathered.empty(batch, columns - 1, wide[:, :dim]))
            moved = (t.to(ops.device) for t in (path, lengths, slots.int() if gap else slots, prefixes))
            ops.feature_gather(wide.to(ops.device)[:, :dim], *moved, out=out)
            buffers.intact()
            for request, length in enumerate(lengths.tolist()):
                rest, nodes = columns - length, request * width + path[request, :length].long()
                assert rest == 0 or bool((out.features[request, length:].view(torch.uint8) == 0).all())
                equal("features", out.features[request, :length], wide[nodes, :dim])
                equal("slots", out.slots[request], [*slots[request, :length].tolist(), *[0] * rest])
                places = [int(prefixes[request]) + i for i in range(length)]
                equal("positions", out.positions[request], [*places, *[0] * rest])
    assert GUARD_BYTE != 0  # so that padding which was not written would show


def requests_past_the_batch_are_padding(ops) -> None:
    """The buffers of a graph that was captured for more requests: rows of an earlier batch must not be met again."""
    random = np.random.default_rng(5)
    buffers = Buffers(ops.device)
    held = buffers.like(Gathered.empty(6, 3, torch.empty(1, 40, dtype=torch.bfloat16)))
    for batch in (6, 2, 5, 1):
        path, lengths = random_paths(random, batch, 9, 4)
        slots = random_slots(random, batch, 9)
        prefixes = torch.from_numpy(random.integers(1, 10**6, batch))
        features = torch.from_numpy(random.normal(0, 1, (batch * 9, 40))).bfloat16()
        given = [tensor.to(ops.device) for tensor in (features, path, lengths, slots, prefixes)]
        alone = ops.feature_gather(*given, out=buffers.like(Gathered.empty(batch, 3, features)))
        for rows in (6, batch):
            out = Gathered(*(tensor[:rows] for tensor in vars(held).values()))
            for tensor in vars(held).values():
                tensor.view(torch.uint8).fill_(GUARD_BYTE)
            assert ops.feature_gather(*given, out=out) is out
            buffers.intact()
            for name, tensor in vars(held).items():
                equal(name, tensor[:batch], getattr(alone, name).cpu())
                assert bool((tensor[batch:rows].view(torch.uint8) == 0).all()), f"{name}: padding is not zero"
                assert bool((tensor[rows:].view(torch.uint8) == GUARD_BYTE).all()), f"{name}: written past its end"


CHECKS = {
    check.__name__: check
    for check in (random_commits, row_sizes, field_cases, padded_requests, gathers, requests_past_the_batch_are_padding)
}
