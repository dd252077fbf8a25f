"""The paged, absorbed, fused forward against the textbook: dense, unpaged, un-absorbed, expert by expert."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.toy.checkpoints import drafter_tensors, target_tensors

from treeverify.errors import ConfigError, WeightsError
from treeverify.models.drafter import Drafter
from treeverify.models.target import Target
from treeverify.ops.tree_attention.reference import tree_attention_reference

SLOTS, LENGTH = 200, 60
SHAPES = {
    "packaged": {},
    "low-rank queries": {"q_lora_rank": 96, "num_hidden_layers": 2},
    "halves": {"rope_interleave": False, "num_hidden_layers": 2},
    "two shared experts": {"n_shared_experts": 2, "routed_scaling_factor": 2.5, "num_hidden_layers": 2},
    "plain weights": {"norm_topk_prob": False, "tie_word_embeddings": True, "num_hidden_layers": 2},
}


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rope(x, positions, interleaved):
    """x [tokens, heads, 64] by the definition, pair by pair; pairs are neighbours or halves."""
    out = torch.empty_like(x)
    for pair in range(32):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 32)
        angle = positions.double() / 10000 ** (2 * pair / 64)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
    return out


def mlp(w, prefix, h):
    return F.linear(F.silu(F.linear(h, w[prefix + "gate_proj.weight"])) * F.linear(h, w[prefix + "up_proj.weight"]),
                    w[prefix + "down_proj.weight"])  # fmt: skip


def moe(c, w, prefix, h):
    out = mlp(w, prefix + "shared_experts.", h) if c.n_shared_experts else torch.zeros_like(h)
    scores = torch.sigmoid(h @ w[prefix + "gate.weight"].T)
    for token in range(len(h)):
        chosen = (scores[token] + w[prefix + "gate.e_score_correction_bias"]).argsort(descending=True)[:4]
        share = scores[token, chosen]
        share = (share / share.sum() if c.norm_topk_prob else share) * c.routed_scaling_factor
        for expert, weight in zip(chosen.tolist(), share, strict=True):
            out[token] += weight * mlp(w, f"{prefix}experts.{expert}.", h[token])
    return out


def textbook(c, tensors, ids, visible=None, positions=None):
    """Logits [tokens, vocab] and each layer's output; causal unless ``visible`` [tokens, tokens] says otherwise."""
    w = {name: tensor.float() for name, tensor in tensors.items()}
    tokens = len(ids)
    positions = torch.arange(tokens) if positions is None else positions
    visible = torch.ones(tokens, tokens).tril().bool() if visible is None else visible
    x, outputs = w["model.embed_tokens.weight"][ids], []
    for layer in range(c.num_hidden_layers):
        p, s = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        h = rms(x, w[p + "input_layernorm.weight"])
        if c.q_lora_rank:
            q = F.linear(rms(h @ w[s + "q_a_proj.weight"].T, w[s + "q_a_layernorm.weight"]), w[s + "q_b_proj.weight"])
        else:
            q = h @ w[s + "q_proj.weight"].T
        q = q.view(tokens, 8, 96)
        kv = h @ w[s + "kv_a_proj_with_mqa.weight"].T
        k_rope = rope(kv[:, None, 512:], positions, c.rope_interleave)
        wide = (rms(kv[:, :512], w[s + "kv_a_layernorm.weight"]) @ w[s + "kv_b_proj.weight"].T).view(tokens, 8, 64)
        q = torch.cat([q[..., :32], rope(q[..., 32:], positions, c.rope_interleave)], -1)
        k = torch.cat([wide[..., :32], k_rope.expand(tokens, 8, 64)], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * 96**-0.5
        attention = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        o = torch.einsum("hqk,khd->qhd", attention, wide[..., 32:]).flatten(1)
        x = x + o @ w[s + "o_proj.weight"].T
        h = rms(x, w[p + "post_attention_layernorm.weight"])
        x = x + (moe(c, w, p + "mlp.", h) if layer > 0 else mlp(w, p + "mlp.", h))
        outputs.append(x)
    head = w["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
    return rms(x, w["model.norm.weight"]) @ head.T, outputs


class Paged:
    """A target, a poisoned pool with scattered slots, and the reference operator."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.pool = target.new_pool(SLOTS)
        self.pool.fill_(torch.nan)
        self.slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))

    def run(self, ids, prefix, *, positions=None, bits=None, **options):
        slots = self.slots[prefix : prefix + len(ids)]
        indptr = torch.tensor([0, prefix])

        def attend(layer, q, draft_kv, pool):
            return tree_attention_reference(
                q, draft_kv, pool, indptr, self.slots[:prefix], nodes=len(ids), scale=self.target.scale, tree_bits=bits,
                dtype=torch.float32,
            )[0]  # fmt: skip

        positions = torch.arange(prefix, prefix + len(ids)) if positions is None else positions
        with torch.inference_mode():
            return self.target.forward(ids, positions, list(self.pool), attend, slots=slots, **options)


def ids(count, seed=0):
    return torch.randint(2, 2047, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_paged_forward_equals_the_textbook(changes):
    config, tensors = target_tensors(**changes)
    text = ids(LENGTH)
    want, outputs = textbook(config, tensors, text)
    paged = Paged(Target(config, tensors))
    features = (1, 0)
    first, first_features = paged.run(text[:37], 0, feature_layers=features)
    second, second_features = paged.run(text[37:], 37, feature_layers=features)
    assert want.std() > 0.5
    torch.testing.assert_close(torch.cat([first, second]), want, atol=2e-4, rtol=1e-4)
    got = torch.cat([first_features, second_features])
    torch.testing.assert_close(got, torch.cat([outputs[1], outputs[0]], -1), atol=1e-4, rtol=1e-4)


def test_a_tree_in_one_forward_equals_the_textbook_with_its_mask():
    config, tensors = target_tensors()
    text = ids(30)
    parents = [-1, 0, 0, 1, 1, 2, 3]
    visible = torch.zeros(7, 7, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, node] = True
    positions = 23 + visible.sum(1) - 1
    whole = torch.ones(30, 30).tril().bool()
    whole[23:, 23:] = visible
    want, _ = textbook(config, tensors, text, whole, torch.cat([torch.arange(23), positions]))
    paged = Paged(Target(config, tensors))
    paged.run(text[:23], 0)
    bits = (visible.long() << torch.arange(7)).sum(1)[None, :, None]
    got, _ = paged.run(text[23:], 23, positions=positions, bits=bits)
    torch.testing.assert_close(got, want[23:], atol=2e-4, rtol=1e-4)


def test_chunks_and_row_selection_change_nothing():
    config, tensors = target_tensors()
    target, text = Target(config, tensors), ids(LENGTH)
    whole, _ = Paged(target).run(text, 0)
    paged = Paged(target)
    for begin in range(0, LENGTH, 13):
        part, _ = paged.run(text[begin : begin + 13], begin, rows=torch.tensor([-1]))
        torch.testing.assert_close(part[0], whole[min(begin + 13, LENGTH) - 1], atol=1e-4, rtol=1e-4)
    none, _ = Paged(target).run(text, 0, rows=torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, 2048)


def test_rows_are_written_where_named_and_nowhere_else():
    config, tensors = target_tensors()
    paged = Paged(Target(config, tensors))
    paged.run(ids(20), 0)
    written = paged.pool.isfinite().all(-1)
    assert written[:, paged.slots[:20]].all()
    assert not written[:, paged.slots[20:]].any()


def test_bfloat16_is_near_float32():
    config, tensors = target_tensors()
    text = ids(40)
    exact, _ = Paged(Target(config, tensors)).run(text, 0)
    target = Target(config, tensors, dtype=torch.bfloat16)
    paged = Paged(target)

    def attend(layer, q, draft_kv, pool):
        empty = torch.tensor([], dtype=torch.int64)
        out, _ = tree_attention_reference(q, draft_kv, pool, torch.tensor([0, 0]), empty, nodes=40, scale=target.scale)
        return out.to(q.dtype)

    with torch.inference_mode():
        got, _ = target.forward(text, torch.arange(40), list(paged.pool), attend, slots=paged.slots[:40])
    assert paged.pool.dtype == torch.bfloat16
    assert (got - exact).norm() / exact.norm() < 0.05


def drafter_textbook(c, tensors, head, embedding, features, root):
    """Logits [7, vocab] of one block over features of the committed tokens, straight from the definition."""
    w = {name: tensor.float() for name, tensor in tensors.items()}
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    start = len(context)
    block = torch.arange(start, start + 8)
    x = embedding[torch.tensor([root] + [c.mask_token_id] * 7)]
    for layer in range(c.num_hidden_layers):
        p, s = f"layers.{layer}.", f"layers.{layer}.self_attn."
        h = rms(x, w[p + "input_layernorm.weight"])
        both, places = torch.cat([context, h]), torch.cat([torch.arange(start), block])
        q = rms((h @ w[s + "q_proj.weight"].T).view(8, 4, 64), w[s + "q_norm.weight"])
        k = rms((both @ w[s + "k_proj.weight"].T).view(-1, 2, 64), w[s + "k_norm.weight"])
        v = (both @ w[s + "v_proj.weight"].T).view(-1, 2, 64)
        q, k = rope(q, block, False), rope(k, places, False)
        seen = []
        for one in range(4):
            weights = (q[:, one] @ k[:, one // 2].T / 8.0).softmax(-1)
            seen.append(weights @ v[:, one // 2])
        x = x + torch.cat(seen, -1) @ w[s + "o_proj.weight"].T
        x = x + mlp(w, p + "mlp.", rms(x, w[p + "post_attention_layernorm.weight"]))
    return rms(x[1:], w["norm.weight"]) @ head.T


@pytest.mark.parametrize("lengths", [[40], [40, 40], [40, 3, 1, 17]])
def test_drafts_equal_the_textbook_whatever_the_batch(lengths):
    target = Target(*target_tensors())
    config, tensors = drafter_tensors()
    drafter = Drafter(config, tensors, target)
    pool = drafter.new_pool(SLOTS)
    pool.fill_(torch.nan)
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
    batch, want, offset = [], [], 0
    roots = ids(len(lengths), seed=5)
    for length, root in zip(lengths, roots.tolist(), strict=True):
        features = torch.randn(length, 3 * 192, generator=torch.Generator().manual_seed(length))
        slots = order[offset : offset + length]
        offset += length
        for part in (slice(0, 2), slice(2, length)):  # written as commits do, a few at a time
            drafter.write(pool, slots[part], features[part], torch.arange(length)[part])
        batch.append(slots.repeat(max(lengths))[: max(lengths)])
        want.append(drafter_textbook(config, tensors, target.head, target.embedding, features, root))
    starts = torch.tensor(lengths)
    with torch.inference_mode():
        got = drafter.draft(pool, roots, starts, torch.stack(batch), None if len(set(lengths)) == 1 else starts)
    torch.testing.assert_close(got, torch.stack(want), atol=2e-4, rtol=1e-4)


def test_what_the_forward_does_not_compute_is_refused():
    for changes, name in (
        ({"rope_scaling": {"type": "yarn", "factor": 32}}, "rope_scaling"),
        ({"n_group": 8}, "n_group"),
        ({"scoring_func": "softmax"}, "scoring_func"),
    ):
        with pytest.raises(ConfigError, match=name):
            Target(*target_tensors(**changes, num_hidden_layers=1))


def test_tensors_that_do_not_match_are_refused_in_one_line():
    config, tensors = target_tensors()
    lost = {k: v for k, v in tensors.items() if k != "model.layers.2.mlp.gate.weight"}
    with pytest.raises(WeightsError, match=r"^there: model\.layers\.2\.mlp\.gate\.weight: missing$"):
        Target(config, lost, source="there")
    wrong = tensors | {"lm_head.weight": torch.zeros(2048, 191)}
    with pytest.raises(WeightsError, match=r"lm_head\.weight: expected shape \(2048, 192\), got \(2048, 191\)$"):
        Target(config, wrong)
    with pytest.raises(WeightsError, match=r"got torch\.int8"):
        Target(config, tensors | {"lm_head.weight": torch.zeros(2048, 192, dtype=torch.int8)})
    with pytest.raises(WeightsError, match=r"and \d+ more"):
        Target(config, {})
