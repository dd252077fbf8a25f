"""The torch references against the numpy core, on any input that hypothesis finds. The kernels: test_tree_ops.py."""

from __future__ import annotations

import numpy as np
import torch
from check_accept import law_tensors, outcome
from check_build import VALUES, agrees
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import equal, padded
from tree_implementations import References

from treeverify.tree.accept import accept
from treeverify.tree.law import LawParams, sample, target_law
from treeverify.tree.packing import unpack_rows
from treeverify.tree.topology import Tree
from treeverify.tree.visibility import visibility

REFERENCE = References()


@st.composite
def trees(draw, max_width=12, vocab=4):
    width = draw(st.integers(1, max_width))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, width))]
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=width, max_size=width))
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int32))


@settings(max_examples=150)
@given(st.data(), st.integers(0, 4), st.integers(0, 5), st.integers(0, 30))
def test_built_trees(data, depth, k, budget):
    rows = [
        sorted(data.draw(st.lists(st.sampled_from(VALUES.tolist()), min_size=k, max_size=k)), reverse=True)
        for _ in range(depth)
    ]
    log_probs = torch.tensor(rows, dtype=torch.float32).view(1, depth, k)
    agrees(REFERENCE, log_probs, torch.arange(depth * k).view(1, depth, k) % 7, budget)


@settings(max_examples=100)
@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 12), st.data())
def test_accepted_paths(batch, depth, data):
    width = max(tree.width for tree in batch)
    tokens, parents = padded(batch, width, torch.device("cpu"))
    draws = data.draw(st.lists(st.integers(0, 3), min_size=len(batch) * width, max_size=len(batch) * width))
    samples = torch.tensor(draws).view(len(batch), width)
    out = REFERENCE.tree_accept(tokens, parents, samples, depth=depth)
    for name, want in zip(
        ("path", "lengths", "new_tokens", "bonus"), outcome(batch, samples, width, depth), strict=True
    ):
        equal(name, getattr(out, name), want)


@settings(max_examples=100)
@given(trees(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([None, 1, 2, 3]))
def test_sampled_paths(tree, seed, temperature, top_k):
    random = np.random.default_rng(seed)
    params = LawParams(temperature, top_k, float(np.float32(random.choice([1.0, 0.7]))), 0.0)
    logits = random.normal(0, 1, (tree.width, 4)).astype(np.float32)
    uniforms = random.random((1, tree.width))
    tokens, parents = padded([tree], tree.width, torch.device("cpu"))
    law = law_tensors([params], torch.device("cpu"))
    got = REFERENCE.tree_accept_sampled(tokens, parents, torch.from_numpy(logits), law, torch.from_numpy(uniforms))
    want = accept(tree, sample(target_law(logits, params), uniforms[0][tree.depths]))
    equal("path", got.path[0, : want.length], want.path)
    equal("new tokens", got.new_tokens[0, : want.length], want.new_tokens(tree))


@settings(max_examples=100)
@given(trees(max_width=70), st.integers(0, 2**40))
def test_masks(tree, prefix):
    _, parents = padded([tree], tree.width, torch.device("cpu"))
    masks = REFERENCE.tree_mask(parents, torch.tensor([prefix]))
    assert (unpack_rows(masks.bits[0].numpy(), tree.width) == visibility(tree)).all()
    equal("positions", masks.positions, prefix + tree.depths.astype(np.int64))
