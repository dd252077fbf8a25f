"""A tiny exact target and its drafter: every KV row that a node attends to decides its next token.

The target's attention is uniform (queries are zero), and the value of token t at position p is a row of small integers
that depends on both. So a node's output times the number of rows it sees is an exact integer vector, the sum over the
tokens it sees, from which its next-token logits are looked up. One row too many, one missing, one at the wrong position
or overwritten, in any layer, and the logits are those of another state.

``oracle`` computes the same from the tokens alone, in numpy, without pool, tree or attention.
"""

from __future__ import annotations

import numpy as np
import torch

from treeverify.engine.request import SamplingParams
from treeverify.step.randomness import uniforms
from treeverify.tree.law import sample, target_law

LATENT, ROW, LAYERS, VOCAB, CONTEXT = 512, 576, 2, 23, 96
STATES = 4093
EOS = 1


def _tables(seed: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.integers(-8, 9, size=(LAYERS, VOCAB, CONTEXT + 16, LATENT)).astype(np.float32)
    weights = rng.integers(1, STATES, size=(LAYERS, LATENT))
    logits = (rng.normal(size=(STATES, VOCAB)) * 2.0).astype(np.float32)
    logits[:, EOS] -= 6.0  # rare, so that most texts reach their limit
    return values, weights, logits


VALUES, WEIGHTS, LOGITS = _tables()


def states(sums: np.ndarray) -> np.ndarray:
    """State int64 [...] of exact sums [..., LAYERS, LATENT]."""
    return (np.rint(sums).astype(np.int64) * WEIGHTS).sum((-1, -2)) % STATES


def oracle(tokens: list[int]) -> np.ndarray:
    """Logits float32 [VOCAB] after ``tokens``."""
    return LOGITS[states(VALUES[:, tokens, np.arange(len(tokens))].astype(np.float64).sum(1))]


class ToyTarget:
    """Implements ``engine.protocols.Target``; features are (token, position), for the drafter to check."""

    scale = 1.0
    device = torch.device("cpu")
    vocab_size, context, eos_token_ids = VOCAB, CONTEXT, (EOS,)

    def __init__(self) -> None:
        self.forwards: list[int] = []  # tokens of each forward

    def new_pool(self, slots: int) -> torch.Tensor:
        return torch.empty(LAYERS, slots, ROW)

    def forward(self, ids, positions, kv, attend, *, slots=None, rows=None, feature_layers=()):
        tokens = len(ids)
        self.forwards.append(tokens)
        sums = np.empty((tokens, LAYERS, LATENT))
        for layer in range(LAYERS):
            row = torch.zeros(tokens, ROW)
            row[:, :LATENT] = torch.from_numpy(VALUES[layer, ids.numpy(), positions.numpy()])
            if slots is not None:
                kv[layer].index_copy_(0, slots, row)
            out = attend(layer, torch.zeros(tokens, 2, ROW), row, kv[layer])
            assert torch.allclose(out[:, 0], out[:, 1], atol=1e-3)
            sums[:, layer] = out[:, 0].double().numpy() * (positions.numpy() + 1)[:, None]
        assert np.abs(sums - np.rint(sums)).max(initial=0) < 0.2, "a node did not see exactly position + 1 rows"
        logits = torch.from_numpy(LOGITS[states(sums)])
        features = torch.stack([ids, positions], -1).float()
        return (logits if rows is None else logits[rows]), features


class ToyDrafter:
    """Implements ``engine.protocols.Drafter``: reads the committed tokens back from its pool and asks the oracle.

    Depth d's best guess is the oracle's greedy continuation, put at a rank that depends on the text: often first, often
    second or third, sometimes nowhere. It fails loudly if its context rows are not the tokens 0 .. P-1 in order.
    """

    def __init__(self, depth: int = 5, skill: float = 0.45) -> None:
        self.depth, self.feature_layers, self._skill = depth, (0,), skill

    def new_pool(self, slots: int) -> torch.Tensor:
        return torch.empty(slots, 2)

    def write(self, pool, slots, features, positions):
        assert torch.equal(features[:, 1].long(), positions)
        pool.index_copy_(0, slots, features)

    def draft(self, pool, roots, starts, context_slots, lengths):
        batch, longest = context_slots.shape
        counts = [longest] * batch if lengths is None else lengths.tolist()
        assert counts == starts.tolist()
        assert pool[context_slots].isfinite().all(), "a padding slot names an unwritten row"
        logits = np.zeros((batch, self.depth, VOCAB), dtype=np.float32)
        for i, count in enumerate(counts):
            rows = pool[context_slots[i, :count]]
            assert torch.equal(rows[:, 1], torch.arange(count).float()), "context rows are not in position order"
            text = [*rows[:, 0].long().tolist(), int(roots[i])]
            logits[i] = self._guess(text)
        return torch.from_numpy(logits)

    def _guess(self, text: list[int]) -> np.ndarray:
        rng = np.random.default_rng([len(text), *text[-3:]])
        logits = rng.normal(size=(self.depth, VOCAB)).astype(np.float32)
        for depth in range(self.depth):
            text = [*text, int(oracle(text).argmax())]
            boost = 6.0 if rng.random() < self._skill else rng.choice([2.5, 0.0], p=[0.75, 0.25])
            logits[depth, text[-1]] += boost
        return logits


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens that ``params`` must give, from the oracle alone: token by token, no engine, no tree."""
    text = list(prompt)
    stop = (EOS,) if params.stop_token_ids is None else params.stop_token_ids
    for _ in range(min(params.max_new_tokens, CONTEXT - len(prompt))):
        law = target_law(oracle(text)[None], params.law)
        number = uniforms(torch.tensor([params.seed or 0]), torch.tensor([len(text) - 1]), 1)[0].numpy()
        text.append(int(sample(law, number)[0]))
        if text[-1] in stop:
            break
    return text[len(prompt) :]


class NoisyDrafter(ToyDrafter):
    """Drafts nonsense: nothing is ever gained, and nothing may be lost."""

    def _guess(self, text: list[int]) -> np.ndarray:
        rng = np.random.default_rng(text)
        return rng.normal(size=(self.depth, VOCAB)).astype(np.float32)
