"""SGLang's worker as the host of a step: its slot table, runners, mask buffer, pools and account of requests."""

from __future__ import annotations

from typing import Any

import torch

from treeverify.integrations.sglang.ddtree import compact, compat, graphs
from treeverify.integrations.sglang.ddtree.auto import Auto
from treeverify.integrations.sglang.ddtree.window import open_window
from treeverify.ops.draft_window.contract import DraftWindow
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.ops.kv_compact.contract import PoolTable
from treeverify.ops.tree_accept.contract import LawTensors
from treeverify.ops.tree_build.contract import DraftTrees
from treeverify.ops.tree_mask.contract import TreeMasks
from treeverify.step.draft import Head, TreeDraft
from treeverify.step.host import Outcome, Verified
from treeverify.step.randomness import seed_of
from treeverify.step.window import Window


class SGLangHost:
    """Serves the steps of one worker; a batch is SGLang's, or a `graphs.Rehearsal`."""

    def __init__(self, worker: Any, block: int, width: int, auto: Auto | None) -> None:
        """``block``: the drafter's; ``width``: of the widest trees."""
        self._worker, self._block, self._width, self._auto = worker, block, width, auto
        self.device = torch.device(worker.device)
        self.wanted = width
        """Nodes that the step under way is to verify."""
        self._tail: TreeDraft | None = None
        self._windows: dict[tuple[int, int], DraftWindow] = {}
        self._mask = torch.empty(0, dtype=torch.bool, device=self.device)
        self._seeds: tuple[list[int], torch.Tensor] | None = None

    def tail(self, captured: int) -> TreeDraft:
        """The tail of the draft; the first call sizes what graphs write to, for batches of up to ``captured``."""
        if self._tail is None:
            self._tail = TreeDraft(Head(*compat.output_head(self._worker)), self._block, self._width, captured)
        return self._tail

    def open(self, batch: Any, drafts: bool) -> Window:
        """Find the window of a step in SGLang's slot table.

        Its buffers serve every step of as many requests: what reads them is on the same stream, before the next step.
        """
        size = len(batch.seq_lens), self._block if drafts else 1
        if size not in self._windows:
            self._windows[size] = DraftWindow.empty(*size, self._width, self.device)
        return open_window(self._worker, batch, self._windows[size])

    def draft(self, batch: Any, window: Window) -> DraftTrees:
        """Run SGLang's draft runner; with a CUDA graph, the trees are its tail."""
        ids, requests = window.block.ids, len(window.lengths)
        seen = compact.seen(self._worker, batch, window, self._block)
        out = compat.run_draft(self._worker, batch, seen, ids, window.block.positions)
        tail = self.tail(requests)
        if not (out.can_run_graph and self._worker._draft_sampler is tail):  # else the graph built the trees
            tail.reserve(requests)
            tail(out.logits_output.hidden_states, ids.flatten())
        return tail.trees(requests)

    def width(self, batch: Any, trees: DraftTrees) -> int:
        """As ``wanted``; what was drafted for requests that are there is told to who chose it."""
        if self._auto is not None and not isinstance(batch, graphs.Rehearsal):
            self._auto.drafted(trees.scores)
        return self.wanted

    def masks(self, window: Window, width: int) -> TreeMasks:
        """The buffer that SGLang's captured verify graphs read, or our own for a batch that none serves."""
        requests = len(window.lengths)
        cells = width * (window.bound + requests * width)
        mask = compat.mask_buffer(self._worker, requests)
        return TreeMasks(full_mask=self._own_mask(cells) if mask is None else mask[:cells])  # SGLang copies it

    def verify(self, batch: Any, window: Window, ids: torch.Tensor, masks: TreeMasks) -> Verified:
        """Run SGLang's TARGET_VERIFY forward."""
        if self._auto is not None:
            self._auto.use(ids.shape[1])
        assert masks.positions is not None
        assert masks.full_mask is not None
        run = graphs.rehearse_verify if isinstance(batch, graphs.Rehearsal) else compat.run_verify
        out = run(self._worker, batch, window, ids, masks.positions, masks.full_mask)
        return Verified(out.logits_output.next_token_logits, out.logits_output.hidden_states, out)

    def law(self, batch: Any) -> LawTensors | None:
        """From SGLang's account of how requests sample, which is None for nobody's batch."""
        sampling = batch.sampling_info
        if sampling is None or sampling.is_all_greedy:
            return None
        return LawTensors(
            temperature=sampling.temperatures.reshape(-1),
            top_k=sampling.top_ks.to(torch.int32),
            top_p=sampling.top_ps,
            min_p=sampling.min_ps,
        )

    def seeds(self, batch: Any) -> torch.Tensor:
        """Seeds on the device; copied there when the batch changes."""
        seeds = [seed_of(req.rid, req.sampling_params.sampling_seed) for req in batch.reqs]
        if self._seeds is None or self._seeds[0] != seeds:
            self._seeds = seeds, torch.tensor(seeds).to(self.device, non_blocking=True)
        return self._seeds[1]

    def pools(self) -> PoolTable:
        """The target's KV pool."""
        return PoolTable.of(compat.kv_buffers(self._worker))

    def append(self, rows: Gathered) -> None:
        """Write packed features as DFLASH does."""
        compat.append_features(self._worker, rows)

    def result(self, batch: Any, outcome: Outcome) -> Any:
        """Build SGLang's result of a step."""
        accepted, output = outcome.accepted, outcome.verified.output
        output.logits_output.hidden_states = None  # large; the scheduler would copy it to the host
        return compat.result(
            logits_output=output.logits_output,
            next_token_ids=accepted.new_tokens.reshape(-1),
            accept_lens=accepted.lengths,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=self._worker._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=outcome.lengths
            ),
            speculative_num_draft_tokens=outcome.width,
            new_seq_lens=outcome.lengths,
        )

    def _own_mask(self, cells: int) -> torch.Tensor:
        """A mask for a batch that no captured graph serves; prefix cells are never read."""
        if len(self._mask) < cells:
            self._mask = torch.zeros(2 * cells, dtype=torch.bool, device=self.device)
        return self._mask
