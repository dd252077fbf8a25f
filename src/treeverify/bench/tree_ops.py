"""The tree operators' benchmark: each operator and the chains of a step, checked once, then timed, into records.

The geometry is that of a Kimi K2 rank with a DFlash block of 16 unless told otherwise: 163,840 tokens, 15 draft depths,
61 layers of KV rows of 576 bf16 values, features of 5 x 7168. A replay is a CUDA graph of ``CALLS`` calls on the same
buffers, so caches are as the call before left them. Graph nodes run back to back: launch gaps inside a graph count,
host time does not. The moved paths have 5 nodes and are not the identity. Samples follow first children to the leaf;
the sampled walk's logits are normal (deviation 2) with 18 added for that token, which then has a probability of 0.98.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from treeverify.bench import record, tree_ops_vocab
from treeverify.bench.timing import interleave, make_replay, median
from treeverify.bench.tree_ops_check import check_all
from treeverify.errors import ConfigError
from treeverify.ops.draft_topk.api import draft_topk, draft_topk_combine, draft_topk_shard
from treeverify.ops.draft_topk.contract import Ranked, workspace_elements
from treeverify.ops.draft_window.api import draft_window
from treeverify.ops.draft_window.contract import DraftWindow
from treeverify.ops.feature_gather.api import feature_gather
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.kv_compact.api import kv_compact
from treeverify.ops.kv_compact.contract import PoolTable
from treeverify.ops.tree_accept import contract as accept_contract
from treeverify.ops.tree_accept.api import tree_accept, tree_accept_sampled
from treeverify.ops.tree_accept.contract import Accepted, LawTensors
from treeverify.ops.tree_build.api import tree_build
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.ops.tree_mask.api import tree_mask
from treeverify.ops.tree_mask.contract import TreeMasks

BENCHMARK = "tree-ops"
CALLS = 20
_PATH = (0, 2, 3, 5, 8)


@dataclass(frozen=True)
class Geometry:
    """Sizes of one measured point; ``shards`` is the tensor parallelism of the sharded ranking."""

    batch: int
    budget: int
    depth: int = 15
    vocab: int = 163_840
    layers: int = 61
    row: int = 576
    feature: int = 35_840
    shards: int = 8


class Workload:
    """Inputs and outputs of every operator at one point."""

    def __init__(self, size: Geometry, device: torch.device, seed: int = 0) -> None:
        """Random logits, and the trees that are built from them."""
        torch.manual_seed(seed)
        batch, width, depth, k = size.batch, size.budget + 1, size.depth, size.budget
        self.size, self.device = size, device
        self.logits = torch.randn(batch, depth, size.vocab, device=device) * 3
        self.workspace = torch.empty(workspace_elements(batch, depth, size.vocab, k), dtype=torch.int64, device=device)
        self.ranked, self.combined = Ranked.empty(batch, depth, k, device), Ranked.empty(batch, depth, k, device)
        self.shards = torch.empty(size.shards, batch, depth, k + 1, dtype=torch.int64, device=device)
        self.roots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.rows = torch.arange(batch, device=device).flip(0)
        self.table = torch.arange(batch * 8192, dtype=torch.int32, device=device).view(batch, 8192)
        self.window = DraftWindow.empty(batch, min(depth + 1, width), width, device)
        self.trees = DraftTrees.empty(batch, width, device)
        self.prefixes = torch.full((batch,), 4096, dtype=torch.int64, device=device)
        self.masks = TreeMasks.empty(batch, width, device)
        self.target = torch.randn(batch * width, size.vocab, device=device) * 2
        self.uniforms = torch.rand(batch, depth + 1, dtype=torch.float64, device=device)
        draws = accept_contract.workspace_elements(batch)
        self.draw_workspace = torch.empty(draws, dtype=torch.int64, device=device)
        self.accepted, self.drawn = (Accepted.empty(batch, width, depth, device) for _ in range(2))
        slots = torch.randperm(4 * batch * width + 1, device=device)[: batch * width] + 1
        self.slots = slots.view(batch, width)
        pools = torch.randn(size.layers, 4 * batch * width + 2, size.row, device=device).bfloat16()
        self.pools = PoolTable.of(list(pools))
        self.features = torch.randn(batch * width, size.feature, device=device).bfloat16()
        self.gathered = Gathered.empty(batch, depth, self.features)
        length = min(len(_PATH), depth + 1, width)
        path = torch.full((batch, depth + 1), -1, dtype=torch.int32)
        path[:, :length] = torch.tensor(_PATH[:length])
        self.path = path.clamp(max=width - 1).to(device)
        self.identity = torch.arange(depth + 1, dtype=torch.int32, device=device).repeat(batch, 1)
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self.rank()
        self.build()
        tokens = self.trees.tokens
        self.samples = tokens.gather(1, self._first_children().clamp(max=width - 1)).contiguous()
        rows = torch.arange(batch * width, device=device)
        self.target[rows, self.samples.flatten()] += 18.0

    def _first_children(self) -> torch.Tensor:
        """The lowest-numbered child of each node, itself if it has none: what its sample will name."""
        parents, width = self.trees.parents.long(), self.trees.parents.shape[1]
        child = torch.arange(width, device=self.device).repeat(parents.shape[0], 1)
        for node in range(width - 1, 0, -1):
            parent = parents[:, node : node + 1]
            child.scatter_(1, parent.clamp(min=0), torch.where(parent >= 0, node, child.gather(1, parent.clamp(min=0))))
        return child

    def law(self, top_p: float) -> LawTensors:
        """Temperature 1 and ``top_p`` for every request."""
        batch, device = self.size.batch, self.device
        return LawTensors(
            torch.ones(batch, device=device),
            torch.full((batch,), 1 << 30, dtype=torch.int32, device=device),
            torch.full((batch,), top_p, device=device),
            torch.zeros(batch, device=device),
        )

    def open(self) -> None:
        """draft_window."""
        block, width = self.window.ids.shape[1], self.size.budget + 1
        given = (self.rows, self.prefixes, self.table, self.roots)
        draft_window(*given, block=block, width=width, mask_token=self.size.vocab - 1, out=self.window)

    def rank(self) -> None:
        """draft_topk of the whole vocabulary."""
        draft_topk(self.logits, self.size.budget, out=self.ranked, workspace=self.workspace)

    def rank_shard(self, shard: int = 0) -> None:
        """draft_topk_shard of one rank's columns."""
        columns = self.size.vocab // self.size.shards
        part = self.logits[..., shard * columns : (shard + 1) * columns]
        out, first = self.shards[shard], shard * columns
        draft_topk_shard(part, self.size.budget, first_id=first, out=out, workspace=self.workspace)

    def combine(self) -> None:
        """draft_topk_combine of all ranks' results."""
        draft_topk_combine(self.shards, out=self.combined)

    def build(self) -> None:
        """tree_build."""
        ranked = self.ranked
        tree_build(ranked.log_probs, ranked.token_ids, self.roots, budget=self.size.budget, out=self.trees)

    def mask(self) -> None:
        """tree_mask: bits and positions."""
        tree_mask(self.trees.parents, self.prefixes, out=self.masks)

    def accept(self) -> None:
        """tree_accept of samples that follow first children as deep as they go."""
        trees = self.trees
        tree_accept(trees.tokens, trees.parents, self.samples, depth=self.size.depth, out=self.accepted)

    def draw(self, law: LawTensors) -> None:
        """tree_accept_sampled."""
        trees = self.trees
        given = (trees.tokens, trees.parents, self.target, law, self.uniforms)
        tree_accept_sampled(*given, out=self.drawn, workspace=self.draw_workspace)

    def compact(self, path: torch.Tensor) -> None:
        """kv_compact of all layers."""
        kv_compact(self.pools, self.slots, path, self.lengths)

    def gather(self) -> None:
        """feature_gather."""
        feature_gather(self.features, self.path, self.lengths, self.slots, self.prefixes, out=self.gathered)

    def calls(self) -> dict[str, Callable[[], None]]:
        """What is timed, by name: the operators, then chains of them."""
        plain, nucleus = self.law(1.0), self.law(0.95)
        commit = (lambda: self.compact(self.path), self.gather)
        return {
            "draft_window": self.open,
            "draft_topk": self.rank,
            f"draft_topk_shard of {self.size.shards}": self.rank_shard,
            f"draft_topk_combine of {self.size.shards}": self.combine,
            "tree_build": self.build,
            "tree_mask": self.mask,
            "tree_accept": self.accept,
            "tree_accept_sampled": lambda: self.draw(plain),
            "tree_accept_sampled, top-p": lambda: self.draw(nucleus),
            "kv_compact": commit[0],
            "kv_compact, identity": lambda: self.compact(self.identity),
            "feature_gather": self.gather,
            "chain: topk, build, mask": _chain(self.rank, self.build, self.mask),
            "chain: accept, compact, gather": _chain(self.accept, *commit),
            "chain: sampled top-p, compact, gather": _chain(lambda: self.draw(nucleus), *commit),
        }


def _chain(*calls: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def run_point(
    size: Geometry, device: torch.device, output: Path, rounds: int, commit: str | None
) -> list[record.Record]:
    """Check every operator at one point, time all of them in interleaved rounds, append a record for each."""
    work = Workload(size, device)
    check_all(work)
    calls = work.calls()
    replays = {name: make_replay([call] * CALLS, device) for name, call in calls.items()}
    runs = interleave(replays, rounds)
    accepted = work.accepted.lengths.float().mean().item()
    drawn = work.drawn.lengths.float().mean().item()
    entries = []
    for name, times in runs.items():
        case = {**asdict(size), "device": device.type, "path": work.lengths[0].item(), "calls": CALLS}
        measures = {"us": round(median(times), 3), "us_runs": [round(us, 3) for us in times], "checked": True}
        measures |= {"accepted": accepted, "drawn": drawn}
        entry = {"benchmark": BENCHMARK, "impl": name, "case": case, "measures": measures}
        entry |= record.environment(commit=commit)
        record.append(output, entry)
        entries.append(entry)
        print(f"batch {size.batch:>3} budget {size.budget:>4}  {name:40}{measures['us']:>10.2f} us", flush=True)
    return entries


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    made = argparse.ArgumentParser(prog="treeverify bench tree-ops", description=__doc__)
    made.add_argument(
        "--suites",
        default="steps,vocab",
        help="Of steps, vocab: the operators of a step, those that read a vocabulary.",
    )
    made.add_argument("--batches", default="1,16", help="Requests at once, for steps.")
    made.add_argument("--budgets", default="16,32,64", help="Draft nodes beside the root, for steps.")
    made.add_argument("--depth", type=int, default=15, help="Depth of the trees, for steps.")
    records = Path("benchmarks/results/tree-ops.jsonl")
    made.add_argument("--output", type=Path, default=records, help="Append the records to this file.")
    made.add_argument("--rounds", type=int, default=15, help="Interleaved rounds.")
    made.add_argument("--commit", default=None, help="Written into the records; default: ask git.")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the benchmark: ``python -m treeverify.bench.tree_ops``."""
    chosen = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        raise ConfigError("bench tree-ops: no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    suites = chosen.suites.split(",")
    if unknown := set(suites) - {"steps", "vocab"}:
        raise ConfigError(f"bench tree-ops: --suites: expected steps, vocab, got {sorted(unknown)[0]}")
    for point in tree_ops_vocab.POINTS if "vocab" in suites else ():
        tree_ops_vocab.run_point(point, device, chosen.output, chosen.rounds, chosen.commit)
        torch.cuda.empty_cache()
    for batch in map(int, chosen.batches.split(",")) if "steps" in suites else ():
        for budget in map(int, chosen.budgets.split(",")):
            size = Geometry(batch, budget, chosen.depth)
            run_point(size, device, chosen.output, chosen.rounds, chosen.commit)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
