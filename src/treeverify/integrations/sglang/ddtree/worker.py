"""The worker: DFLASH's, with a tree between its draft and its verify. Prefill and idle batches stay with the parent.

One decode step: block of the drafter, tree, verify call of the target over all nodes, walk, move of the accepted KV
rows, accepted features into the drafter's KV. Nothing waits for the device, so the scheduler may run a step ahead.
Where drafting does not pay (``auto``), a step of the scheduler's is a run of plain steps instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from treeverify.errors import ConfigError
from treeverify.integrations.sglang import modes
from treeverify.integrations.sglang.ddtree import compact, compat, graphs, simulated
from treeverify.integrations.sglang.ddtree.auto import Auto
from treeverify.integrations.sglang.ddtree.draft import Head, TreeDraft, front
from treeverify.integrations.sglang.ddtree.features import Features
from treeverify.integrations.sglang.ddtree.ladder import ladder_of
from treeverify.integrations.sglang.ddtree.metrics import Metrics
from treeverify.integrations.sglang.ddtree.plain import Chains, Roots, run_of
from treeverify.integrations.sglang.ddtree.randomness import is_greedy, law_of, seed_of, uniforms
from treeverify.integrations.sglang.ddtree.window import Window, open_window
from treeverify.ops import compiled
from treeverify.ops.draft_window.contract import DraftWindow
from treeverify.ops.kv_compact.api import kv_compact
from treeverify.ops.kv_compact.contract import PoolTable
from treeverify.ops.tree_accept.api import tree_accept, tree_accept_sampled
from treeverify.ops.tree_accept.contract import Accepted
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.ops.tree_mask.api import tree_mask
from treeverify.ops.tree_mask.contract import TreeMasks


class Steps:
    """One decode step after another for one worker; holds what outlives a step."""

    def __init__(self, worker: Any, block: int, width: int, ladder: tuple[int, ...] | None = None) -> None:
        """``ladder``: widths to choose from, None for ``width`` always."""
        self._worker, self._block, self._width = worker, block, width
        self.auto = None if ladder is None else Auto(worker, ladder, run_of(block))
        if torch.device(worker.device).type == "cuda":
            compiled.prepare(torch.device(worker.device))  # loading cannot be captured
        self.metrics = Metrics(width, block, self.auto)
        self._simulated = simulated.settings()
        if self._simulated is not None:
            self.metrics.simulated_acceptance = self._simulated.length
        self._tail: TreeDraft | None = None
        self._features = Features(partial(compat.append_features, worker))
        self._roots, self._chains = Roots(torch.device(worker.device)), Chains(block, worker.device)
        self._windows: dict[tuple[int, int], DraftWindow] = {}
        self._mask = torch.empty(0, dtype=torch.bool, device=worker.device)
        self._table: PoolTable | None = None
        self._seeds: tuple[list[int], torch.Tensor] | None = None

    def draft(self, captured: int) -> TreeDraft:
        """The tail of the draft; the first call sizes what graphs write to, for batches of up to ``captured``."""
        if self._tail is None:
            self._tail = TreeDraft(Head(*compat.output_head(self._worker)), self._block, self._width, captured)
        return self._tail

    def prepare(self) -> None:
        """Graphs of the end of a step; with a ladder, graphs and costs of all its widths.

        After SGLang's own captures, before any request.
        """
        if graphs.captures(self._worker):
            switch = modes.current()
            with switch.capture(switch.start), torch.no_grad(), graphs.rehearsal(self._worker, 1, 1) as batch:
                self._rehearse(batch, self._width)
            sizes = graphs.captured_batches(self._worker)
            self._features.capture(sizes, partial(graphs.capture_appends, self._worker))
        if self.auto is not None:
            self.auto.prepare(self._rehearse)
        self.metrics.restart_clocks()

    def decode(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> Any:
        """Run one step for ``batch``, or a run of plain ones; returns SGLang's result of a step."""
        width, run = self._width, 1
        if self.auto is not None:
            plan = self.auto.plan(batch)
            width, run = plan.width, plan.run
        self.metrics.step(len(batch.seq_lens), width, run)
        if width == 1:
            return self._plain(batch, on_publish, run)
        return self._step(batch, on_publish, width, live=True)

    def verified(self, drafts: list[int]) -> None:
        """Learn from the outcome of a step: accepted draft tokens of each request."""
        self.metrics.drafted = self.auto is None or not self.auto.verified(drafts)

    def _rehearse(self, batch: graphs.Rehearsal, width: int) -> None:
        """A step that is nobody's; of width 0 its draft alone, of width 1 a run of plain steps."""
        if width == 0:
            self._draft(self._open(batch, self._block), batch)
        elif width == 1:
            self._plain(batch, None, run_of(self._block))
        else:
            self._step(batch, None, width, live=False)

    def _plain(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None, run: int) -> Any:
        """``run`` steps of one node each without a draft, the scheduler's own work done once for all of them.

        To the scheduler they are one step that has accepted a chain.
        """
        spent, begin = self.metrics.spent, perf_counter()
        window, chains = self._open(batch, 1), self._chains
        lengths, tokens, given, rows = chains.lengths(window.lengths, run), window.block.ids[:, 0], [], []
        mask = self._mask_of(window, 1).fill_(1)  # cells of prefixes are not read, and a root sees itself
        begin = spent("draft", begin)
        for here in window.each(lengths):
            verified = self._run(batch, here, tokens.unsqueeze(1), here.lengths, mask)
            begin = spent("verify", begin)
            given.append(self._next(batch, here, tokens, verified.logits_output.next_token_logits))
            tokens = given[-1].clamp(min=0)  # -1 is no token
            rows.append(verified.logits_output.hidden_states.clone())  # the next step overwrites a graph's output
            begin = spent("accept", begin)
        chain = chains.accepted(torch.stack(given, 1), drawn=not is_greedy(batch.sampling_info))
        after = window.lengths + chain.lengths
        if on_publish is not None:
            on_publish(after)
            begin = perf_counter()
        verified.logits_output.hidden_states = torch.stack(rows, 1).flatten(0, 1)
        self._append(window.front(run), chain, verified.logits_output)  # the KV rows are in their places
        spent("commit", begin)
        return self._result(verified, chain, after, run)

    def _step(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None, width: int, live: bool) -> Any:
        """A draft, its tree, and what follows."""
        spent, begin = self.metrics.spent, perf_counter()
        window = self._open(batch, self._block)
        trees = self._trees(batch, window, width, live)
        window, begin = window.front(width), spent("draft", begin)
        verified = self._verify(batch, window, trees)
        begin = spent("verify", begin)
        accepted = self._accept(batch, window, trees, verified.logits_output.next_token_logits)
        lengths = window.lengths + accepted.lengths
        begin = spent("accept", begin)
        if on_publish is not None:
            on_publish(lengths)
            begin = perf_counter()
        self._commit(window, accepted, verified.logits_output)
        spent("commit", begin)
        return self._result(verified, accepted, lengths, width)

    def _result(self, verified: Any, accepted: Accepted, lengths: torch.Tensor, width: int) -> Any:
        return compat.result(
            logits_output=verified.logits_output,
            next_token_ids=accepted.new_tokens.reshape(-1),
            accept_lens=accepted.lengths,
            can_run_cuda_graph=verified.can_run_cuda_graph,
            next_draft_input=self._worker._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=lengths
            ),
            speculative_num_draft_tokens=width,
            new_seq_lens=lengths,
        )

    def _trees(self, batch: Any, window: Window, width: int, live: bool) -> DraftTrees:
        """The trees to verify: those of the draft, or their fronts."""
        trees = self._draft(window, batch)
        if self.auto is not None and live:
            self.auto.drafted(trees.scores)
        return trees if width == self._width else front(trees, width)

    def _open(self, batch: Any, block: int) -> Window:
        """The window of a step, with a draft of ``block`` tokens (1: none).

        Its buffers serve every step of as many requests: what reads them is on the same stream, before the next step.
        """
        size = len(batch.seq_lens), block
        if size not in self._windows:
            self._windows[size] = DraftWindow.empty(*size, self._width, self._worker.device)
        return open_window(self._worker, batch, self._windows[size])

    def _draft(self, window: Window, batch: Any) -> DraftTrees:
        ids, requests = window.block.ids, len(window.lengths)
        seen = compact.seen(self._worker, batch, window, self._block)
        out = compat.run_draft(self._worker, batch, seen, ids, window.block.positions)
        tail = self.draft(requests)
        if not (out.can_run_graph and self._worker._draft_sampler is tail):  # else the graph built the trees
            tail.reserve(requests)
            tail(out.logits_output.hidden_states, ids.flatten())
        return tail.trees(requests)

    def _verify(self, batch: Any, window: Window, trees: DraftTrees) -> Any:
        mask = self._mask_of(window, trees.tokens.shape[1])
        positions = torch.empty(trees.tokens.numel(), dtype=torch.int64, device=mask.device)
        tree_mask(trees.parents, window.lengths, out=TreeMasks(positions=positions, full_mask=mask))
        return self._run(batch, window, trees.tokens, positions, mask)

    def _run(self, batch: Any, window: Window, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> Any:
        """Verify ``ids [batch, width]`` in the window's slots."""
        if self.auto is not None:
            self.auto.use(ids.shape[1])
        run = graphs.rehearse_verify if isinstance(batch, graphs.Rehearsal) else compat.run_verify
        return run(self._worker, batch, window, ids, positions, mask)

    def _mask_of(self, window: Window, width: int) -> torch.Tensor:
        """Where the masks of trees of ``width`` go; flat, and at least as long as they are."""
        requests = len(window.lengths)
        cells = width * (window.bound + requests * width)
        mask = compat.mask_buffer(self._worker, requests)
        return self._own_mask(cells) if mask is None else mask[:cells]  # SGLang copies what it is given

    def _own_mask(self, cells: int) -> torch.Tensor:
        """A mask for a batch that no captured graph serves; prefix cells are never read."""
        if len(self._mask) < cells:
            self._mask = torch.zeros(2 * cells, dtype=torch.bool, device=self._mask.device)
        return self._mask

    def _next(self, batch: Any, window: Window, roots: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """What follows the roots ``[batch]``, drawn where requests sample: int64 ``[batch]``, -1 for none."""
        if is_greedy(batch.sampling_info):
            return logits.argmax(-1)
        return self._accept(batch, window, self._roots(roots.unsqueeze(1)), logits).bonus

    def _accept(self, batch: Any, window: Window, trees: DraftTrees, logits: torch.Tensor) -> Accepted:
        depth = self._block - 1  # of narrower trees too: graphs fix the columns of paths
        if self._simulated is not None:
            return self._simulated.accept(trees, logits.argmax(-1).view_as(trees.tokens), depth)
        if is_greedy(batch.sampling_info):
            samples = logits.argmax(-1).view_as(trees.tokens)
            return tree_accept(trees.tokens, trees.parents, samples, depth=depth)
        numbers = uniforms(self._seeds_of(batch), window.lengths, depth + 1)
        return tree_accept_sampled(trees.tokens, trees.parents, logits, law_of(batch.sampling_info), numbers)

    def _seeds_of(self, batch: Any) -> torch.Tensor:
        """Seeds int64 [batch] on the device; copied there when the batch changes."""
        seeds = [seed_of(req.rid, req.sampling_params.sampling_seed) for req in batch.reqs]
        if self._seeds is None or self._seeds[0] != seeds:
            self._seeds = seeds, torch.tensor(seeds).to(self._worker.device, non_blocking=True)
        return self._seeds[1]

    def _commit(self, window: Window, accepted: Accepted, output: Any) -> None:
        """Move the accepted rows of the target's KV to the front; write their features into the drafter's KV."""
        if self._table is None:
            self._table = PoolTable.of(compat.kv_buffers(self._worker))
        kv_compact(self._table, window.slots, accepted.path, accepted.lengths)
        self._append(window, accepted, output)

    def _append(self, window: Window, accepted: Accepted, output: Any) -> None:
        self._features(output.hidden_states, accepted, window.slots, window.lengths)
        output.hidden_states = None  # large; the scheduler would copy it to the host


def extend(parent: type, block_of: Callable[[Any], int], add: Callable[[Metrics, Any], Callable[[], None]]) -> type:
    """Return the worker class on top of DFLASH's; ``block_of`` reads the drafter's block.

    ``add`` takes counters and the target's runner; what it returns is called after each step.
    """

    class DDTreeWorker(parent):  # type: ignore[misc]
        """DFLASH's worker with a tree between draft and verify."""

        def __init__(self, server_args: Any, *arguments: Any, **options: Any) -> None:
            compat.check()
            compact.check()
            graphs.check()
            block = block_of(server_args)  # asked for while the parent builds the draft's runner
            super().__init__(server_args, *arguments, **options)
            width = self.speculative_num_draft_tokens
            if refused := compat.unserved(self):
                raise ConfigError(f"--speculative-algorithm DDTREE does not serve: {'; '.join(refused)}")
            compat.use_block(self, block)
            self.steps = Steps(self, block, width, ladder_of(block, width))
            self._after = add(self.steps.metrics, self.model_runner)

        def _maybe_build_draft_sampler(self) -> Any:
            """What the draft's graph runs after the drafter: the trees instead of an argmax."""
            return self.steps.draft(compat.most_requests())

        def init_cuda_graphs(self) -> None:
            """SGLang's graphs, then those of the other widths."""
            super().init_cuda_graphs()
            self.steps.prepare()

        def forward_batch_generation(self, batch: Any, on_publish: Any = None, *rest: Any, **options: Any) -> Any:
            """Prefill and idle batches as DFLASH; a decode step with a tree."""
            mode = batch.forward_mode
            if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
                if self.steps.auto is not None:
                    self.steps.auto.interrupt()
                return super().forward_batch_generation(batch, on_publish, *rest, **options)
            return self.steps.decode(batch, on_publish)

        def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], *rest: Any, **options: Any) -> None:
            """Learn from the accepted depths, which SGLang has on the host by now."""
            self.steps.verified(num_correct_drafts_per_req)

        def count(self, tokens: list[int]) -> None:
            """Count what that step then gave out: tokens of each request that had not ended before it."""
            self.steps.metrics.accept(tokens)
            self._after()

    return DDTreeWorker
