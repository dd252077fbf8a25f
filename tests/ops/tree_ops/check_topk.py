"""draft_topk against tree.top_candidates and float64. Covers F29 (global ids under TP) and F30 of the field faults."""

from __future__ import annotations

import numpy as np
import torch
from tree_cases import Buffers, equal

from treeverify.ops.draft_topk.contract import TILE, Ranked, log_prob_error, workspace_elements
from treeverify.tree.build import top_candidates


def ranked(ops, logits: torch.Tensor, k: int) -> Ranked:
    batch, depth, vocab = logits.shape
    buffers = Buffers(ops.device)
    out = buffers.like(Ranked.empty(batch, depth, k, "cpu"))
    workspace = buffers.empty(workspace_elements(batch, depth, vocab, k), dtype=torch.int64)
    ops.draft_topk(logits, k, out=out, workspace=workspace)
    buffers.intact()
    return out


def sharded(ops, logits: torch.Tensor, k: int, cuts: list[int]) -> Ranked:
    """The same from shards that end at ``cuts``, gathered in a shuffled order."""
    batch, depth, vocab = logits.shape
    buffers = Buffers(ops.device)
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, vocab], strict=True):
        part = buffers.empty(batch, depth, k + 1, dtype=torch.int64)
        workspace = buffers.empty(workspace_elements(batch, depth, end - begin, k), dtype=torch.int64)
        ops.draft_topk_shard(logits[..., begin:end], k, first_id=begin, out=part, workspace=workspace)
        parts.insert(len(parts) // 2, part)
    out = buffers.like(Ranked.empty(batch, depth, k, "cpu"))
    ops.draft_topk_combine(torch.stack(parts), out=out)
    buffers.intact()
    return out


def is_right(out: Ranked, logits: torch.Tensor, k: int) -> None:
    """Ids as tree.top_candidates has them, log-probabilities within the derived bound of float64."""
    vocab = logits.shape[2]
    kept = min(k, vocab)
    for request, rows in enumerate(logits.cpu()):
        found = top_candidates(rows.float().numpy(), k)
        rest = [[0] * (k - kept)] * len(rows)
        equal("token_ids", out.token_ids[request], np.concatenate([found.token_ids, rest], axis=1))
        exact = rows.double()
        lse = torch.logsumexp(exact, dim=-1, keepdim=True)
        values = exact.gather(1, torch.tensor(found.token_ids))
        want = torch.where(lse == -torch.inf, -torch.inf, values - lse)
        got = out.log_probs[request].cpu().double()
        assert bool((got[:, kept:] == -torch.inf).all())
        finite = want.isfinite()
        assert torch.equal(got[:, :kept].isfinite(), finite), "finite where it should not be, or the other way"
        error = (got[:, :kept] - want).abs()[finite]
        bound = log_prob_error(want, values)[finite]
        assert bool((error <= bound).all()), f"error {float((error / bound).max()):.2f} times the bound"
        assert bool((out.log_probs[request, :, 1:] <= out.log_probs[request, :, :-1]).all()), "rising"


def hostile(random: np.random.Generator, shape: tuple[int, ...], device, dtype=torch.float32) -> torch.Tensor:
    """Logits of odd strides in a sea of NaN: normal ones, ties, -inf, and rows of nothing but one value or -inf."""
    batch, depth, vocab = shape
    wide = torch.full((batch, depth + 1, vocab + 3), torch.nan, dtype=dtype, device=device)
    logits = wide[:, :depth, 1 : vocab + 1]
    values = torch.from_numpy(random.normal(0, 4, shape).astype(np.float32))
    kinds = random.integers(0, 6, (batch, depth))
    values[kinds == 1] = values[kinds == 1].round()
    values[kinds == 2] = torch.where(values[kinds == 2] > 0, -torch.inf, values[kinds == 2])
    values[kinds == 3] = 0.0
    values[kinds == 4] = torch.where(values[kinds == 4] > 0, -0.0, 0.0)
    values[kinds == 5] = -torch.inf if random.random() < 0.5 else 7.25
    logits.copy_(values)
    return logits


def sizes(ops) -> None:
    random = np.random.default_rng(0)
    for vocab in (1, 2, 5, 31, 255, 256, 257, 1000, TILE - 1, TILE, TILE + 1, 2 * TILE + 1, 20_000):
        for k in (1, 8, 9, 64, 256):
            logits = hostile(random, (2, 3, vocab), ops.device)
            is_right(ranked(ops, logits, k), logits, k)


def bfloat16_and_batches(ops) -> None:
    random = np.random.default_rng(1)
    for batch, depth, vocab, k in ((1, 15, 3000, 32), (5, 2, 9000, 16), (3, 1, 17_000, 100)):
        logits = hostile(random, (batch, depth, vocab), ops.device, torch.bfloat16)
        is_right(ranked(ops, logits, k), logits, k)
    empty = torch.empty(0, 3, 10, device=ops.device)
    ranked(ops, empty, 2)


def adversarial_orders(ops) -> None:
    """Sorted rows, all of the best in one thread's columns, two values only, denormals and the largest floats."""
    vocab = 10_000
    rising = torch.arange(vocab, dtype=torch.float32) / 100
    strided = torch.zeros(vocab)
    strided[3::256] = torch.arange(len(strided[3::256])).float() + 1
    two = torch.zeros(vocab)
    two[::2] = 1.0
    tiny = rising * 1e-42
    large = torch.linspace(-1.7e38, 1.7e38, vocab)
    logits = torch.stack([rising, rising.flip(0), strided, two, tiny, large])[None].to(ops.device)
    for k in (1, 7, 33, 256):
        is_right(ranked(ops, logits, k), logits, k)


def shards_give_the_ids_of_one(ops) -> None:
    random = np.random.default_rng(2)
    for vocab, cuts in (
        (1000, [500]), (1000, [1, 2, 999]), (9, [2, 3, 7]), (20_000, [5000, 10_000, 15_000]),
        (17_000, list(range(1000, 17_000, 1000))),
    ):  # fmt: skip
        for k in (1, 16, 64):
            logits = hostile(random, (2, 3, vocab), ops.device)
            out = sharded(ops, logits, k, cuts)
            is_right(out, logits, k)
            equal("token_ids", out.token_ids, ranked(ops, logits, k).token_ids.cpu())


def nan_and_infinity_spoil_their_own_row(ops) -> None:
    if ops.name == "cpu":
        return  # refuses them by position: test_tree_ops_contract
    for bad in (torch.nan, torch.inf, -torch.nan):
        for column in (0, 700, 8191, 8192, 9999):
            logits = torch.zeros(1, 3, 10_000, device=ops.device)
            logits[0, 1, column] = bad
            for out in (ranked(ops, logits, 5), sharded(ops, logits, 5, [3000, 9000])):
                assert bool(out.log_probs[0, 1].isnan().all())
                assert bool(out.log_probs[0, ::2].isfinite().all())


CHECKS = {
    check.__name__: check
    for check in (
        sizes,
        bfloat16_and_batches,
        adversarial_orders,
        shards_give_the_ids_of_one,
        nan_and_infinity_spoil_their_own_row,
    )
}
