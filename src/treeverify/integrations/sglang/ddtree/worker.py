"""The worker: DFLASH's, with a tree between its draft and its verify. Prefill and idle batches stay with the parent.

A decode step is `step.Step`, which `host` serves. Where drafting does not pay (``auto``), it is a
run of plain steps instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from treeverify.errors import ConfigError
from treeverify.integrations.sglang import modes
from treeverify.integrations.sglang.ddtree import compact, compat, graphs, simulated
from treeverify.integrations.sglang.ddtree.auto import Auto
from treeverify.integrations.sglang.ddtree.host import SGLangHost
from treeverify.integrations.sglang.ddtree.ladder import ladder_of
from treeverify.integrations.sglang.ddtree.metrics import Metrics
from treeverify.ops import compiled
from treeverify.step.draft import TreeDraft
from treeverify.step.plain import run_of
from treeverify.step.step import Step


class Steps:
    """The decode steps of one worker: which they are, how they are counted, what is captured before the first."""

    def __init__(self, worker: Any, block: int, width: int, ladder: tuple[int, ...] | None = None) -> None:
        """``ladder``: widths to choose from, None for ``width`` always."""
        self._worker, self._block, self._width = worker, block, width
        self.auto = None if ladder is None else Auto(worker, ladder, run_of(block))
        if torch.device(worker.device).type == "cuda":
            compiled.prepare(torch.device(worker.device))  # loading cannot be captured
        self.metrics = Metrics(width, block, self.auto)
        simulation = simulated.settings()
        if simulation is not None:
            self.metrics.simulated_acceptance = simulation.length
        self.host = SGLangHost(worker, block, width, self.auto)
        accept = None if simulation is None else simulation.accept
        self.step: Step[Any, Any] = Step(self.host, block, self.metrics.spent, accept)

    def draft(self, captured: int) -> TreeDraft:
        """The tail of the draft; the first call sizes what graphs write to, for batches of up to ``captured``."""
        return self.host.tail(captured)

    def prepare(self) -> None:
        """Graphs of the end of a step; with a ladder, graphs and costs of all its widths.

        After SGLang's own captures, before any request.
        """
        if graphs.captures(self._worker):
            switch = modes.current()
            with switch.capture(switch.start), torch.no_grad(), graphs.rehearsal(self._worker, 1, 1) as batch:
                self._rehearse(batch, self._width)
            sizes = graphs.captured_batches(self._worker)
            self.step.features.capture(sizes, partial(graphs.capture_appends, self._worker))
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
            return self.step.plain(batch, run, on_publish)
        self.host.wanted = width
        return self.step.drafted(batch, on_publish)

    def verified(self, drafts: list[int]) -> None:
        """Learn from the outcome of a step: accepted draft tokens of each request."""
        self.metrics.drafted = self.auto is None or not self.auto.verified(drafts)

    def _rehearse(self, batch: graphs.Rehearsal, width: int) -> None:
        """A step that is nobody's; of width 0 its draft alone, of width 1 a run of plain steps."""
        if width == 0:
            self.host.draft(batch, self.host.open(batch, drafts=True))
        elif width == 1:
            self.step.plain(batch, run_of(self._block))
        else:
            self.host.wanted = width
            self.step.drafted(batch)


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
