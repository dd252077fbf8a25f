"""A real scheduler of SGLang 0.5.17 or 0.5.23 in this process, on a CPU, without sockets. Needs TRITON_INTERPRET=1.

One scheduler per process, since SGLang keeps its groups and its arguments in globals.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

STEPS_LIMIT = 400


def stand_in_for_vllm() -> None:
    """SGLang's rotary embedding falls back to an operator of vLLM on a device that it does not know."""

    def rotary_embedding(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, size: int, table: torch.Tensor, neox: bool
    ) -> None:
        cos, sin = table[positions.flatten()].float()[:, None].chunk(2, -1)
        for rows in (query, key):
            turned = rows.view(positions.numel(), -1, size)[..., : table.shape[-1]]
            even, odd = turned.float().chunk(2, -1) if neox else (turned[..., ::2].float(), turned[..., 1::2].float())
            both = (even * cos - odd * sin, odd * cos + even * sin)
            turned.copy_(torch.cat(both, -1) if neox else torch.stack(both, -1).flatten(-2))

    package, module = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    module.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    package._custom_ops = module  # type: ignore[attr-defined]
    sys.modules |= {"vllm": package, "vllm._custom_ops": module}


def start(server_args: Any) -> Any:
    """Build the scheduler as SGLang's own process for it does."""
    from sglang.srt import runtime_context
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.server_args import PortArgs

    if not hasattr(runtime_context, "SpawnRanks"):  # 0.5.17: ranks are arguments
        configure_scheduler_process(server_args, 0, 0, 0, 0, 0, 0, None)
        runtime_context.publish(server_args, role="scheduler")
        return Scheduler(server_args, PortArgs.init_new(server_args), 0, 0, 0, 0, 0, 0, None)
    server_args.resolve_once()
    server_args.check_server_args()
    ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    runtime_context.publish(server_args, role="scheduler", ranks=ranks)
    configure_scheduler_process(server_args, 0)
    return Scheduler(server_args, PortArgs.init_new(server_args))


def draft_in_float32() -> None:
    """SGLang hands a model its input embeddings in bfloat16, whatever its dtype; at its start already."""
    from sglang.srt.models.dflash import DFlashDraftModel

    stock = DFlashDraftModel.forward

    def forward(*arguments: Any, input_embeds: torch.Tensor, **options: Any) -> Any:
        return stock(*arguments, input_embeds=input_embeds.float(), **options)

    DFlashDraftModel.forward = forward


class Server:
    """The scheduler, and its requests by number."""

    def __init__(self, target: Path, **changes: Any) -> None:
        stand_in_for_vllm()
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        load_plugins()
        arguments: dict[str, Any] = {
            "model_path": str(target),
            "device": "cpu",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "random_seed": 1,
            "triton_attention_num_kv_splits": 1,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": 1024,
            "max_running_requests": 4,
            "mem_fraction_static": 0.2,
            "context_length": 256,
            "log_level": "warning",
        }
        server_args = ServerArgs(**(arguments | changes))
        if "speculative_draft_model_path" in changes:
            draft_in_float32()
        self.scheduler = start(server_args)
        self.scheduler.ipc_channels.send_to_detokenizer.send_output = lambda *_: None
        self.scheduler.ipc_channels.send_to_tokenizer.send_output = lambda *_: None
        self.requests: list[Any] = []

    def submit(self, ids: list[int], tokens: int, **sampling: Any) -> Any:
        """Queue a request; returns SGLang's own object for it."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        more = {name: sampling.pop(name) for name in ("return_logprob", "stop_token_ids") if name in sampling}
        values = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        if "stop_token_ids" in more:
            values["stop_token_ids"] = more.pop("stop_token_ids")
        parameters = SamplingParams(**values)
        parameters.normalize(None)
        message = TokenizedGenerateReqInput(
            rid=f"request {len(self.requests)}",
            input_text=None,
            input_ids=array("q", ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=parameters,
            return_logprob=more.get("return_logprob", False),
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self.scheduler.process_input_requests([message])
        self.requests.append(self.scheduler.waiting_queue[-1])
        return self.requests[-1]

    def step(self) -> bool:
        """Run what SGLang's own loop runs once; False if there was nothing to do."""
        scheduler = self.scheduler
        with torch.no_grad():
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = plan.batch_to_run
            if batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            scheduler.last_batch = batch
        return bool(batch)

    def run(self) -> None:
        """Step until all requests are finished, then let SGLang check its accounts: it raises for a leaked slot."""
        for _ in range(STEPS_LIMIT):
            if not self.step() and all(request.finished() for request in self.requests):
                self.scheduler.on_idle()
                return
        raise AssertionError(f"not finished after {STEPS_LIMIT} steps")

    def run_ahead(self) -> None:
        """As `run`, with SGLang's overlapping loop: a step is launched before the last one's result is looked at."""
        scheduler, polls = self.scheduler, iter(range(STEPS_LIMIT))
        scheduler.gracefully_exit = False

        def ingest() -> None:
            over = all(request.finished() for request in self.requests)
            scheduler.gracefully_exit = over or next(polls, None) is None

        scheduler.ingest_requests = ingest
        scheduler._war_barrier_enabled = False  # it waits for events of a GPU
        scheduler.event_loop_overlap()
        assert all(request.finished() for request in self.requests)
        scheduler.on_idle()

    def free_slots(self) -> int:
        """Slots that nobody holds; the prefix cache holds some."""
        return int(
            self.scheduler.token_to_kv_pool_allocator.available_size() + self.scheduler.tree_cache.evictable_size()
        )
