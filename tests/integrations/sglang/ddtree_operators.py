"""Torch operators and kernels of ours in a decode step by stage, on a real scheduler: a measure of host work, no clock.

``ddtree_operators.py FOLDER`` prints a table and one JSON object. What runs
inside SGLang's own calls (forwards, their preparation, the drafter's KV) is counted apart. A kernel of ours counts as
one, although on a CPU its reference runs in its place.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.integrations.sglang.ddtree_scenarios import PROMPTS, texts, tree
from tests.integrations.sglang.ddtree_scheduler import Server
from tests.integrations.sglang.processes import say

STAGES = ("draft", "verify", "accept", "commit", "rest")
KINDS = ("kernels", "operators", "views", "sglang")
"""Ours; torch's that compute or allocate; torch's that only view; torch's inside SGLang's calls and graphs."""
OURS = ("draft_window", "draft_topk", "tree_build", "tree_mask", "tree_accept", "kv_compact", "feature_gather")


class Operators(TorchDispatchMode):
    """Counts by stage and kind while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.steps = 0
        self._stage, self._inside = "rest", ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside != "kernels":
            results = func._schema.returns
            view = bool(results) and all(r.alias_info is not None and not r.alias_info.is_write for r in results)
            self.counts[self._stage, self._inside or ("views" if view else "operators")] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def within(self, stage: str, kind: str) -> Iterator[None]:
        """Count under a stage, or as of a kind; what is nested in a kernel or in SGLang stays there."""
        before = self._stage, self._inside
        self._stage = stage or self._stage
        self._inside = kind if kind == "kernels" else self._inside or kind
        if kind == "kernels" and not before[1]:
            self.counts[self._stage, kind] += 1
        try:
            yield
        finally:
            self._stage, self._inside = before

    def watch(self, owner: Any, name: str, stage: str = "", kind: str = "") -> None:
        """Replace ``owner.name`` by itself under a stage or a kind."""
        stock: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            with self.within(stage, kind):
                return stock(*arguments, **options)

        setattr(owner, name, watched)

    def table(self) -> dict[str, dict[str, float]]:
        """Operators per step by stage and kind."""
        return {stage: {kind: round(self.counts[stage, kind] / self.steps, 2) for kind in KINDS} for stage in STAGES}


def watched(server: Server) -> Operators:
    """Counters of the decode steps that ``server`` runs from now on."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    from treeverify.integrations.sglang.ddtree import window
    from treeverify.step import draft, features, step

    found, served = Operators(), server.scheduler.draft_worker
    steps = served.steps
    for module in (step, draft, features, window):
        for name in OURS:
            if hasattr(module, name):
                found.watch(module, name, kind="kernels")
    for owner, name, stage in (
        (steps.host, "open", "draft"),
        (steps.host, "draft", "draft"),
        (steps.host, "width", "draft"),
        (step, "front", "draft"),
        (steps.step, "_verify", "verify"),
        (steps.step, "_accept", "accept"),
        (steps.step, "_commit", "commit"),
    ):
        found.watch(owner, name, stage)
    found.watch(draft.TreeDraft, "__call__", kind="sglang")  # on a GPU a part of the draft's graph
    found.watch(served.draft_model_runner, "forward", kind="sglang")
    found.watch(served.target_worker, "forward_batch_generation", kind="sglang")
    found.watch(DFlashVerifyInput, "prepare_for_verify", kind="sglang")
    found.watch(served, "_append_target_hidden_to_draft_kv_by_loc", kind="sglang")
    found.watch(served, "_make_next_draft_input_decode", kind="sglang")
    found.watch(served.model_runner.kv_index_translator, "plan", kind="sglang")
    decode = steps.decode

    def counted(*arguments: Any) -> Any:
        found.steps += 1
        with found:
            return decode(*arguments)

    steps.decode = counted
    return found


def show(name: str, table: dict[str, dict[str, float]]) -> None:
    """Print one table."""
    print(f"{name:12}" + "".join(f"{kind:>12}" for kind in KINDS))
    for stage, counts in table.items():
        print(f"{stage:12}" + "".join(f"{counts[kind]:12g}" for kind in KINDS))
    print(f"{'all':12}" + "".join(f"{sum(row[kind] for row in table.values()):12g}" for kind in KINDS), flush=True)


def main(folder: Path) -> dict[str, Any]:
    """Count the steps of three greedy requests that run together, when others have run: what is kept is there."""
    server = tree(folder)
    texts(server, PROMPTS)
    counters = watched(server)
    texts(server, PROMPTS)
    show("per step", counters.table())
    return counters.table()


if __name__ == "__main__":
    say(main(Path(sys.argv[1])))
