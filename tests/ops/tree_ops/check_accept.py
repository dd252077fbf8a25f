"""The walks against tree.accept and tree.law. Covers F4, F6 (padding) and F29 of the field faults."""

from __future__ import annotations

import numpy as np
import torch
from tree_cases import WIDTHS, Buffers, equal, padded, random_trees

from treeverify.ops.tree_accept.contract import LAW_ERROR, Accepted, LawTensors, workspace_elements
from treeverify.tree.accept import accept
from treeverify.tree.law import LawParams, sample, target_law

OFF = 1 << 30


def outcome(trees, samples: torch.Tensor, width: int, depth: int) -> tuple[list, list, list, list]:
    """Path, lengths, new tokens and bonus as tree.accept has them, cut at ``depth``."""
    paths, lengths, tokens, bonus = [], [], [], []
    for request, tree in enumerate(trees):
        result = accept(tree, samples[request, : tree.width].numpy())
        path = result.path[: depth + 1].tolist()
        new = [int(samples[request, node]) for node in path]
        paths.append([*path, *[-1] * (depth + 1 - len(path))])
        tokens.append([*new, *[-1] * (width - len(new))])
        lengths.append(len(path))
        bonus.append(new[-1])
    return paths, lengths, tokens, bonus


def holds(out: Accepted, expected: tuple[list, list, list, list]) -> None:
    for name, want in zip(("path", "lengths", "new_tokens", "bonus"), expected, strict=True):
        equal(name, getattr(out, name), want)


def greedy_walks(ops, vocab: int = 2) -> None:
    random = np.random.default_rng(0)
    for width in WIDTHS:
        for depth in {0, 1, width // 2, width - 1}:
            trees = random_trees(random, 6, width, vocab)
            tokens, parents = padded(trees, width, ops.device)
            samples = torch.from_numpy(random.integers(0, vocab, (6, width)))
            buffers = Buffers(ops.device)
            out = buffers.like(Accepted.empty(6, width, depth, "cpu"))
            ops.tree_accept(tokens, parents, samples.to(ops.device), depth=depth, out=out)
            buffers.intact()
            holds(out, outcome(trees, samples, width, depth))


def of_equal_siblings_the_first(ops) -> None:
    tokens = torch.tensor([[5, 7, 7, 7, 9]], device=ops.device)
    parents = torch.tensor([[-1, 0, 0, 0, 2]], dtype=torch.int32, device=ops.device)
    samples = torch.tensor([[7, 9, 9, 9, 1]], device=ops.device)
    out = Accepted.empty(1, 5, 3, ops.device)
    ops.tree_accept(tokens, parents, samples, depth=3, out=out)
    holds(out, ([[0, 1, -1, -1]], [2], [[7, 9, -1, -1, -1]], [9]))


def garbage_in_padded_requests(ops) -> None:
    """Whatever a padded request holds, the others' results stay and nothing is written elsewhere."""
    random = np.random.default_rng(1)
    trees = random_trees(random, 2, 9, 2)
    tokens, parents = padded(trees, 9, torch.device("cpu"))
    samples = torch.from_numpy(random.integers(0, 2, (2, 9)))
    junk = torch.from_numpy(random.integers(-(2**31), 2**31, (2, 9)))
    tokens, samples = torch.cat([tokens, junk]), torch.cat([samples, junk.abs()])
    parents = torch.cat([parents, junk.int()])
    buffers = Buffers(ops.device)
    out = buffers.like(Accepted.empty(4, 9, 3, "cpu"))
    ops.tree_accept(*(t.to(ops.device) for t in (tokens, parents, samples)), depth=3, out=out)
    buffers.intact()
    live = Accepted(out.path[:2], out.lengths[:2], out.new_tokens[:2], out.bonus[:2])
    holds(live, outcome(trees, samples, 9, 3))


def law_tensors(params: list[LawParams], device: torch.device) -> LawTensors:
    return LawTensors(
        torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        torch.tensor([OFF if p.top_k is None else p.top_k for p in params], dtype=torch.int32, device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
    )


def as_kernel(params: LawParams) -> LawParams:
    """The same with the numbers that float32 tensors hold."""
    single = (float(np.float32(value)) for value in (params.temperature, params.top_p, params.min_p))
    temperature, top_p, min_p = single
    return LawParams(temperature, params.top_k, top_p, min_p)


def root_draws(ops, logits: torch.Tensor, params: LawParams, uniforms: np.ndarray) -> np.ndarray:
    """One draw per uniform from one row of logits: requests that are a root alone."""
    batch = len(uniforms)
    buffers = Buffers(ops.device)
    out = buffers.like(Accepted.empty(batch, 1, 0, "cpu"))
    rows = logits.to(ops.device).expand(batch, -1).contiguous()
    numbers = torch.from_numpy(uniforms).view(batch, 1).to(ops.device)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=ops.device)
    parents = torch.full((batch, 1), -1, dtype=torch.int32, device=ops.device)
    law = law_tensors([params] * batch, ops.device)
    workspace = buffers.empty(workspace_elements(batch), dtype=torch.int64)
    ops.tree_accept_sampled(tokens, parents, rows, law, numbers, out=out, workspace=workspace)
    buffers.intact()
    return out.bonus.cpu().numpy()


LAWS = (
    LawParams(1.0), LawParams(0.7, top_p=0.9), LawParams(1.3, top_k=20), LawParams(1.0, top_k=40, top_p=0.5),
    LawParams(2.0, min_p=0.05), LawParams(0.6, 50, 0.95, 0.02), LawParams(0.01), LawParams(50.0),
    LawParams(1.0, top_k=2), LawParams(1.0, top_p=1e-9), LawParams(0.0), LawParams(1.0, top_k=1),
    LawParams(1.0, min_p=1.0),
)  # fmt: skip


def boundaries(law: np.ndarray) -> np.ndarray:
    return np.cumsum(law) / law.sum()


def draws_lie_within_the_law(ops) -> None:
    """By enumeration: at numbers just inside both ends of tokens' shares, at random ones, and at both ends of [0, 1).

    The token is the one that float64 draws at a number at most LAW_ERROR away, the stated bound; "just inside" is 1.5
    times that from the boundary, so there it is the very token.
    """
    random = np.random.default_rng(2)
    for vocab, params in [(v, p) for p in LAWS for v in (1, 100, 1025, 5000)]:
        logits = hostile_row(random, vocab)
        while nearest_decision(logits.numpy(), as_kernel(params)) < 1e-5:
            logits = hostile_row(random, vocab)
        law = target_law(logits.numpy(), as_kernel(params))
        edges = boundaries(law)
        inside = np.concatenate([edges + 1.5 * LAW_ERROR, edges - 1.5 * LAW_ERROR])
        near = random.permutation(inside)[:5]
        uniforms = np.clip(np.concatenate([near, random.random(2), [0.0, 1 - 2**-53]]), 0, 1 - 2**-53)
        uniforms = np.floor(uniforms * 2**53) / 2**53
        got = root_draws(ops, logits, params, uniforms)
        low, high = drawn_nearby(law, uniforms)
        assert (law[got] > 0).all(), f"{params}, vocab {vocab}: a token without probability"
        assert ((low <= got) & (got <= high)).all(), f"{params}, vocab {vocab}: {got}, not {low} to {high}"


def drawn_nearby(law: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What float64 draws at the numbers LAW_ERROR below and above."""
    laws = np.broadcast_to(law, (len(uniforms), len(law)))
    low, high = (np.clip(uniforms + step, 0, 1 - 2**-53) for step in (-LAW_ERROR, LAW_ERROR))
    return sample(laws, low), sample(laws, high)


def hostile_row(random: np.random.Generator, vocab: int) -> torch.Tensor:
    """Normal logits, a third of them -inf; with 100 tokens there are ties, also where filters cut."""
    logits = torch.from_numpy(random.normal(0, 3, vocab).astype(np.float32))
    logits[random.integers(0, vocab, vocab // 3)] = -torch.inf
    logits[random.integers(0, vocab)] = 4.0
    return (logits * 2).round() / 2 if vocab == 100 else logits


def nearest_decision(logits: np.ndarray, params: LawParams) -> float:
    """How near top-p or min-p comes to deciding a token the other way, as a fraction of the whole or the largest.

    Tokens as likely as the likeliest have weight 1 exactly in any arithmetic.
    """
    if params.greedy:
        return 1.0
    ranked = -np.sort(-logits.astype(np.float64))
    weights = np.exp((ranked - ranked[0]) / params.temperature)
    margins = [1.0]
    if params.min_p > 0:
        margins.append(np.abs(weights[weights < 1] - params.min_p).min(initial=1.0))
    if params.top_p < 1:
        kept = weights[: params.top_k]
        margins.append(np.abs(kept.cumsum() / kept.sum() - params.top_p).min())
    return float(min(margins))


def the_draw_is_exact_where_all_weights_are_equal(ops) -> None:
    """Equal logits: shares are exact, so every multiple of 1 / vocab falls to its own token."""
    for vocab in (3, 64, 3072, 3073, 5000):
        uniforms = np.floor((np.arange(12) * 37 % vocab + 0.25) / vocab * 2**53) / 2**53
        got = root_draws(ops, torch.zeros(vocab), LawParams(1.0), uniforms)
        assert got.tolist() == [i * 37 % vocab for i in range(12)]
        few = root_draws(ops, torch.zeros(vocab), LawParams(1.0, top_k=3), uniforms)  # ties go to the smaller ids
        assert few.tolist() == np.floor(uniforms * 3).astype(int).tolist()


def mixed_batch_walks(ops) -> None:
    """Greedy and sampling requests side by side, strided logits, both dtypes: path and tokens of the reference walk."""
    from treeverify.ops.tree_accept.reference import tree_accept_sampled_reference

    random = np.random.default_rng(3)
    for dtype, vocab in ((torch.float32, 4), (torch.bfloat16, 4), (torch.float32, 1500)):
        for width in (1, 9, 33):
            batch, depth = 6, 5
            trees = random_trees(random, batch, width, min(vocab, 4))
            tokens, parents = padded(trees, width, torch.device("cpu"))
            wide = torch.from_numpy(random.normal(0, 1, (batch * width, vocab + 3)).astype(np.float32)).to(dtype)
            wide[:, vocab:] = torch.nan
            wide[:, : min(vocab, 4)] += 6  # the tree's tokens
            law = law_tensors([LAWS[i] for i in (0, 1, 10, 3, 5, 11)], torch.device("cpu"))
            uniforms = torch.from_numpy(random.random((batch, depth + 1)))
            want = tree_accept_sampled_reference(tokens, parents, wide[:, :vocab], law, uniforms)
            buffers = Buffers(ops.device)
            out = buffers.like(Accepted.empty(batch, width, depth, "cpu"))
            moved_law = LawTensors(**{name: tensor.to(ops.device) for name, tensor in vars(law).items()})
            logits = wide.to(ops.device)[:, :vocab]
            moved = (tokens.to(ops.device), parents.to(ops.device))
            workspace = buffers.empty(workspace_elements(batch), dtype=torch.int64)
            numbers = uniforms.to(ops.device)
            ops.tree_accept_sampled(*moved, logits, moved_law, numbers, out=out, workspace=workspace)
            buffers.intact()
            holds(out, tuple(getattr(want, name) for name in ("path", "lengths", "new_tokens", "bonus")))


def a_row_without_a_law_ends_the_walk(ops) -> None:
    if ops.name == "cpu":
        return  # refuses it by name: test_tree_ops_contract
    for bad in (torch.nan, torch.inf):
        logits = torch.zeros(3, 50)
        logits[1, 17] = bad
        logits[2] = -torch.inf
        tokens = torch.zeros(3, 1, dtype=torch.int64)
        parents = torch.full((3, 1), -1, dtype=torch.int32)
        law = law_tensors([LawParams(1.0)] * 3, ops.device)
        out = Accepted.empty(3, 1, 0, ops.device)
        moved = (t.to(ops.device) for t in (tokens, parents, logits))
        half = torch.full((3, 1), 0.5, dtype=torch.float64, device=ops.device)
        workspace = torch.empty(workspace_elements(3), dtype=torch.int64, device=ops.device)
        ops.tree_accept_sampled(*moved, law, half, out=out, workspace=workspace)
        equal("bonus", out.bonus, [25, -1, -1])
        equal("lengths", out.lengths, [1, 1, 1])


def vocabularies_as_large_as_they_come(ops) -> None:
    random = np.random.default_rng(4)
    for vocab in (163_840, 1 << 20) if ops.device.type == "cuda" else (163_840,):
        logits = torch.from_numpy(random.normal(0, 2.5, vocab).astype(np.float32))
        for params in (LawParams(1.0), LawParams(0.8, top_p=0.9), LawParams(1.0, 64, 0.95)):
            uniforms = random.random(4)
            got = root_draws(ops, logits, params, uniforms)
            low, high = drawn_nearby(target_law(logits.numpy(), as_kernel(params)), uniforms)
            assert ((low <= got) & (got <= high)).all(), f"{params}, vocab {vocab}: {got}, not {low} to {high}"


CHECKS = {
    check.__name__: check
    for check in (
        greedy_walks,
        of_equal_siblings_the_first,
        garbage_in_padded_requests,
        draws_lie_within_the_law,
        the_draw_is_exact_where_all_weights_are_equal,
        mixed_batch_walks,
        a_row_without_a_law_ends_the_walk,
        vocabularies_as_large_as_they_come,
    )
}
