"""Calls of the tree operators that break a contract, one per rule: operator, what to change in a good call, the error.

A change replaces arguments; names with a dot are fields of an argument. ``PYTHON_ONLY``: what a C++ signature cannot
express, or what only a value check on a CPU finds.
"""

from __future__ import annotations

import torch

from treeverify.ops.draft_topk.contract import Ranked, workspace_elements
from treeverify.ops.draft_window.contract import DraftWindow
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.kv_compact.contract import PoolTable
from treeverify.ops.tree_accept.contract import Accepted, LawTensors
from treeverify.ops.tree_accept.contract import workspace_elements as draw_elements
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.ops.tree_mask.contract import TreeMasks

BATCH, WIDTH, DEPTH, K, VOCAB = 2, 5, 3, 4, 20


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def small(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def good_call(operator: str) -> dict[str, object]:
    """The arguments of a right call, by name."""
    tree = {"tokens": ints(BATCH, WIDTH), "parents": small(BATCH, WIDTH) - 1}
    accepted = Accepted.empty(BATCH, WIDTH, DEPTH, "cpu")
    path, lengths = torch.tensor([[0, 1, -1, -1]] * BATCH).int(), small(BATCH) + 2
    slots = torch.arange(BATCH * WIDTH).view(BATCH, WIDTH) + 1
    ranks = {"k": K, "workspace": ints(workspace_elements(BATCH, DEPTH, VOCAB, K))}
    masks = TreeMasks(
        ints(BATCH, WIDTH, 1), ints(BATCH * WIDTH), torch.zeros(BATCH * WIDTH * (WIDTH + 3), dtype=torch.uint8),
        torch.zeros(BATCH * WIDTH * WIDTH, dtype=torch.bool), ints(3, BATCH, WIDTH),
    )  # fmt: skip
    calls: dict[str, dict[str, object]] = {
        "tree_build": {
            "log_probs": torch.zeros(BATCH, DEPTH, K), "token_ids": ints(BATCH, DEPTH, K), "roots": ints(BATCH),
            "budget": WIDTH - 1, "out": DraftTrees.empty(BATCH, WIDTH, "cpu"),
        },
        "tree_mask": {"parents": tree["parents"], "prefix_lengths": ints(BATCH) + 3, "out": masks},
        "tree_accept": {**tree, "samples": ints(BATCH, WIDTH), "depth": DEPTH, "out": accepted},
        "tree_accept_sampled": {
            **tree, "logits": torch.zeros(BATCH * WIDTH, VOCAB),
            "law": LawTensors(torch.ones(BATCH), small(BATCH) + 9, torch.ones(BATCH), torch.zeros(BATCH)),
            "uniforms": torch.zeros(BATCH, DEPTH + 1, dtype=torch.float64),
            "workspace": ints(draw_elements(BATCH)), "out": accepted,
        },
        "kv_compact": {
            "table": PoolTable.of([torch.zeros(20, 1, 8), torch.zeros(20, 1, 8)]), "slots": slots, "path": path,
            "lengths": lengths,
        },
        "feature_gather": {
            "features": torch.zeros(BATCH * WIDTH, 6), "path": path, "lengths": lengths, "slots": slots,
            "prefix_lengths": ints(BATCH), "out": Gathered.empty(BATCH, DEPTH, torch.zeros(1, 6)),
        },
        "draft_window": {
            "request_rows": ints(BATCH) + 1, "lengths": ints(BATCH) + 3, "slot_table": small(4, WIDTH + 6),
            "roots": ints(BATCH), "block": DEPTH, "width": WIDTH, "mask_token": 7,
            "out": DraftWindow.empty(BATCH, DEPTH, WIDTH, "cpu"),
        },
        "draft_topk": {
            "logits": torch.zeros(BATCH, DEPTH, VOCAB), **ranks, "out": Ranked.empty(BATCH, DEPTH, K, "cpu"),
        },
        "draft_topk_shard": {
            "logits": torch.zeros(BATCH, DEPTH, VOCAB), **ranks, "first_id": 40, "out": ints(BATCH, DEPTH, K + 1),
        },
        "draft_topk_combine": {"shards": ints(3, BATCH, DEPTH, K + 1), "out": Ranked.empty(BATCH, DEPTH, K, "cpu")},
    }  # fmt: skip
    return calls[operator]


def change(arguments: dict[str, object], name: str, value: object) -> dict[str, object]:
    """The call with one argument, or one field of one, replaced."""
    if "." not in name:
        return {**arguments, name: value}
    argument, field = name.split(".")
    whole = arguments[argument]
    return {**arguments, argument: type(whole)(**{**vars(whole), field: value})}


NAN = torch.full((BATCH, DEPTH, VOCAB), torch.nan)
RISING = torch.tensor([-2.0, -1.0, -1.0, -1.0]).expand(BATCH, DEPTH, K).contiguous()
CALLS = (
    ("tree_build", "log_probs", torch.zeros(BATCH, DEPTH, K).double(), "log_probs: dtype: .*float64"),
    ("tree_build", "log_probs", torch.zeros(DEPTH, K), "log_probs: rank: expected 3"),
    ("tree_build", "log_probs", torch.zeros(BATCH, K, DEPTH).transpose(1, 2), "log_probs: strides"),
    ("tree_build", "token_ids", ints(BATCH, DEPTH, K + 1), "token_ids: (shape|dimension 2)"),
    ("tree_build", "token_ids", small(BATCH, DEPTH, K), "token_ids: dtype: .*int32"),
    ("tree_build", "roots", ints(BATCH + 1), "roots: (shape|dimension 0)"),
    ("tree_build", "out.parents", ints(BATCH, WIDTH), r"(out\.)?parents: dtype: .*int64"),
    ("tree_build", "out.scores", torch.zeros(BATCH, WIDTH + 1), r"(out\.)?scores: (shape|dimension 1)"),
    ("tree_build", "out.widths", ints(BATCH), r"(out\.)?widths: dtype"),
    ("tree_mask", "parents", ints(BATCH, WIDTH), "parents: dtype: .*int64"),
    ("tree_mask", "prefix_lengths", torch.zeros(BATCH), "prefix_lengths: dtype: .*float32"),
    ("tree_mask", "prefix_lengths", ints(BATCH + 1), "prefix_lengths: (shape|dimension 0)"),
    ("tree_mask", "out.bits", ints(BATCH, WIDTH, 2), r"(out\.)?bits: (shape|dimension 2)"),
    ("tree_mask", "out.positions", ints(BATCH, WIDTH), r"(out\.)?positions: rank: expected 1"),
    ("tree_mask", "out.qlen_mask", torch.zeros(BATCH * WIDTH * WIDTH - 1).bool(), r"(out\.)?qlen_mask: dimension 0"),
    ("tree_mask", "out.full_mask", torch.zeros(BATCH * WIDTH * 8).int(), r"(out\.)?full_mask: dtype"),
    ("tree_mask", "out.retrieve", ints(2, BATCH, WIDTH), r"(out\.)?retrieve: (shape|dimension 0)"),
    ("tree_accept", "samples", small(BATCH, WIDTH), "samples: dtype: .*int32"),
    ("tree_accept", "samples", ints(BATCH * WIDTH), "samples: rank: expected 2"),
    ("tree_accept", "parents", small(BATCH, WIDTH + 1), "parents: (shape|dimension 1)"),
    ("tree_accept", "out.new_tokens", ints(BATCH, WIDTH - 1), r"(out\.)?new_tokens: (shape|dimension 1)"),
    ("tree_accept", "out.bonus", small(BATCH), r"(out\.)?bonus: dtype"),
    ("tree_accept_sampled", "logits", torch.zeros(BATCH * WIDTH, VOCAB).half(), "logits: dtype: .*float16"),
    ("tree_accept_sampled", "logits", torch.zeros(BATCH * WIDTH + 1, VOCAB), "logits: (shape|dimension 0)"),
    ("tree_accept_sampled", "logits", torch.zeros(VOCAB, BATCH * WIDTH).T, "logits: stride"),
    ("tree_accept_sampled", "uniforms", torch.zeros(BATCH, DEPTH + 1), "uniforms: dtype: .*float32"),
    ("tree_accept_sampled", "law.temperature", torch.ones(BATCH, 1), r"(law\.)?temperature: rank"),
    ("tree_accept_sampled", "law.top_k", ints(BATCH), r"(law\.)?top_k: dtype"),
    ("tree_accept_sampled", "workspace", torch.zeros(99), "workspace: dtype: .*float32"),
    ("kv_compact", "slots", torch.zeros(BATCH, WIDTH), "slots: dtype: .*float32"),
    ("kv_compact", "path", ints(BATCH, DEPTH + 1), "path: dtype: .*int64"),
    ("kv_compact", "lengths", small(BATCH + 1), "lengths: (shape|dimension 0)"),
    ("feature_gather", "features", torch.zeros(BATCH * WIDTH, 6).double(), "features: dtype: .*float64"),
    ("feature_gather", "features", torch.zeros(BATCH * WIDTH + 1, 6), "features: (shape|dimension 0)"),
    ("feature_gather", "prefix_lengths", torch.zeros(BATCH), "prefix_lengths: dtype"),
    (
        "feature_gather",
        "out",
        Gathered.empty(BATCH - 1, DEPTH, torch.zeros(1, 6)),
        "(out.features|packed): dimension 0",
    ),
    ("feature_gather", "out.slots", ints(BATCH + 1, DEPTH + 1), r"(out\.|packed_)slots: (shape|dimension 0)"),
    ("feature_gather", "out.slots", small(BATCH, DEPTH + 1), r"(out\.|packed_)slots: dtype"),
    (
        "feature_gather",
        "out.features",
        torch.zeros(BATCH, DEPTH + 1, 7),
        r"(out\.features|packed): (shape|dimension 2)",
    ),
    ("draft_window", "request_rows", torch.zeros(BATCH), "request_rows: dtype: .*float32"),
    ("draft_window", "lengths", ints(BATCH + 1), "lengths: (shape|dimension 0)"),
    ("draft_window", "lengths", ints(2 * BATCH)[::2], "lengths: stride"),
    ("draft_window", "roots", ints(BATCH, 1), "roots: rank: expected 1"),
    ("draft_window", "slot_table", ints(4, WIDTH + 6), "slot_table: dtype: .*int64"),
    ("draft_window", "slot_table", small(WIDTH + 6, 4).T, "slot_table: strides"),
    ("draft_window", "mask_token", -1, r"mask_token: expected .*0\.\..*, got -1"),
    ("draft_window", "mask_token", 1 << 31, "mask_token: expected"),
    ("draft_window", "out.slots", small(BATCH, WIDTH), r"(out\.)?slots: dtype: .*int32"),
    ("draft_window", "out.ids", ints(BATCH, DEPTH + 1), r"(out\.)?ids: (shape|dimension 1)"),
    ("draft_window", "out.positions", ints(BATCH + 1, DEPTH), r"(out\.)?positions: (shape|dimension 0)"),
    ("draft_topk", "logits", torch.zeros(BATCH, DEPTH, VOCAB).half(), "logits: dtype: .*float16"),
    ("draft_topk", "logits", torch.zeros(BATCH, VOCAB, DEPTH).transpose(1, 2), "logits: stride"),
    ("draft_topk", "out.token_ids", small(BATCH, DEPTH, K), r"(out\.)?token_ids: dtype"),
    ("draft_topk", "workspace", torch.zeros(99), "workspace: dtype: .*float32"),
    ("draft_topk_shard", "first_id", -1, r"first_id: expected .*0\.\..*, got -1"),
    ("draft_topk_shard", "first_id", 1 << 23, "first_id: expected"),
    ("draft_topk_shard", "out", small(BATCH, DEPTH, K + 1), "out: dtype: .*int32"),
    ("draft_topk_combine", "shards", torch.zeros(3, BATCH, DEPTH, K + 1), "shards: dtype"),
    ("draft_topk_combine", "shards", ints(3, BATCH, DEPTH, K + 2), r"(out\.)?log_probs: (shape|dimension 2)"),
)
PYTHON_ONLY = (
    ("tree_build", "budget", 257, r"budget: expected an int in 0\.\.256, got 257"),
    ("tree_build", "budget", True, "budget: expected an int"),
    ("tree_build", "roots", [1, 2], "roots: expected a torch.Tensor, got list"),
    ("tree_build", "roots", ints(BATCH).to("meta"), "roots: device: expected cpu, got meta"),
    ("tree_build", "log_probs", ints(BATCH, DEPTH, K).float().to("meta"), "log_probs: device: expected cpu or cuda"),
    ("tree_build", "log_probs", RISING, r"log_probs\[0, 0, 1\]: expected <= 0 and not above rank - 1, got -1.0"),
    ("tree_build", "log_probs", RISING * torch.nan, r"log_probs\[0, 0, 0\]: .*got nan"),
    ("tree_build", "log_probs", RISING + 3, r"log_probs\[0, 0, 0\]: .*got 1.0"),
    ("tree_mask", "out.full_mask", torch.zeros(79, dtype=torch.uint8), "out.full_mask: dimension 0: expected >= 80"),
    ("tree_accept", "samples", ints(BATCH, WIDTH) - 1, r"samples\[0, 0\]: expected >= 0, got -1"),
    ("tree_accept", "depth", -1, "depth: expected an int"),
    ("tree_accept_sampled", "logits", torch.full((BATCH * WIDTH, VOCAB), torch.nan), r"logits\[0\]: expected finite"),
    ("tree_accept_sampled", "logits", torch.full((BATCH * WIDTH, VOCAB), -torch.inf), r"logits\[0\]: .*not all -inf"),
    ("tree_accept_sampled", "law.temperature", -torch.ones(BATCH), r"law.temperature\[0\]: expected finite, >= 0"),
    ("tree_accept_sampled", "law.top_k", small(BATCH), r"law.top_k\[0\]: expected >= 1, got 0"),
    ("tree_accept_sampled", "law.top_p", torch.zeros(BATCH), r"law.top_p\[0\]: expected in \(0, 1\]"),
    ("tree_accept_sampled", "law.min_p", torch.ones(BATCH) * 2, r"law.min_p\[0\]: expected in \[0, 1\]"),
    ("tree_accept_sampled", "uniforms", torch.ones(BATCH, DEPTH + 1).double(), r"uniforms\[0, 0\]: .*got 1.0"),
    ("kv_compact", "table", [1], "table: expected a PoolTable, got list"),
    ("kv_compact", "slots", ints(BATCH, WIDTH) + 20, r"slots\[0, 0\]: expected 0\.\.19, got 20"),
    ("kv_compact", "slots", ints(BATCH, WIDTH) + 3, r"slots\[0, 1\]: expected distinct slots, got 3 again"),
    ("kv_compact", "path", torch.tensor([[0, 0, 1, 2]] * BATCH).int(), r"path\[0\]: expected 2 nodes rising from 0"),
    ("kv_compact", "path", torch.tensor([[1, 2, 3, 4]] * BATCH).int(), r"path\[0\]: expected"),
    ("kv_compact", "path", torch.tensor([[0, 5, 6, 7]] * BATCH).int(), r"path\[0\]: expected .*below 5"),
    ("kv_compact", "lengths", small(BATCH) + 5, r"path\[0\]: expected 5 nodes"),
    ("feature_gather", "lengths", small(BATCH), r"lengths\[0\]: expected 1\.\.4, got 0"),
    ("feature_gather", "path", small(BATCH, DEPTH + 1) + 5, r"path\[0\]: expected nodes 0\.\.4"),
    ("draft_window", "block", WIDTH + 1, rf"block: expected an int in 1\.\.{WIDTH}, got {WIDTH + 1}"),
    ("draft_window", "width", 258, r"width: expected an int in 1\.\.257, got 258"),
    ("draft_window", "request_rows", ints(BATCH) + 4, r"request_rows\[0\]: expected 0\.\.3, got 4"),
    ("draft_window", "lengths", ints(BATCH) + 7, r"lengths\[0\]: expected 0\.\.6 \(columns - width\), got 7"),
    ("draft_window", "lengths", ints(BATCH) - 1, r"lengths\[0\]: expected .*, got -1"),
    ("draft_topk", "k", 0, "k: expected an int"),
    ("draft_topk", "logits", NAN, "logits: expected finite or -inf, got nan at request 0, depth 0, column 0"),
    ("draft_topk_shard", "logits", NAN.nan_to_num(nan=torch.inf), "logits: expected finite or -inf, got inf"),
)
