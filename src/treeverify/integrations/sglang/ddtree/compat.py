"""The SGLang names that a step of DDTREE uses, 0.5.17 to 0.5.23: DFLASH's worker and inputs, runners, pools.

Only this file, ``compact``, ``draft_backend``, ``graphs``, ``hooks``, ``host``, ``simulated`` and ``window`` name
SGLang's internals. Names are looked up before one is used: when the worker is made; an exception then stops the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from treeverify.integrations.sglang.compat import check_version
from treeverify.integrations.sglang.names import check_parameters, find, mismatch, read
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.step.window import Window

WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
_INPUT = "sglang.srt.speculative.dflash_info.DFlashVerifyInput"
_COMMON = "sglang.srt.speculative.draft_worker_common"
_UTILS = "sglang.srt.speculative.dflash_utils"
INFO = "sglang.srt.speculative.spec_info"
GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
BASE_RUNNER = "sglang.srt.model_executor.runner.base_runner"
SCHEDULER = "sglang.srt.managers.scheduler"
POOLS = "sglang.srt.mem_cache.kv_cache_configurator"
RESERVE = "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
PLAN = "sglang.srt.mem_cache.kv_loc_plan"
_RESULT = "sglang.srt.managers.utils.GenerationBatchResult"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"

_PARAMETERS: Mapping[str, str] = {
    f"{WORKER}.forward_batch_generation": "self batch on_publish",
    f"{WORKER}._maybe_build_draft_sampler": "self",
    f"{WORKER}._append_target_hidden_to_draft_kv_by_loc": "self target_hidden cache_loc positions",
    f"{WORKER}._make_next_draft_input_decode": "self bonus_tokens new_seq_lens",
    f"{_INPUT}.prepare_for_verify": "self batch target_worker",
    f"{_COMMON}.make_draft_block_spec_info": "draft_token_num device",
    f"{_COMMON}.build_block_pos_offsets": "length device",
    f"{_UTILS}.parse_dflash_draft_config": "draft_hf_config",
    f"{_UTILS}.validate_dflash_request": "req enable_overlap",
    f"{SCHEDULER}.validate_dflash_request": "req enable_overlap",
    f"{GRAPHS}.get_spec_info": "self num_tokens",
    f"{RESULTS}.process_batch_result_decode": "self batch result",
    f"{POOLS}.get_req_to_token_extra_context_len": "",
    RESERVE: "",
}


def check() -> None:
    """Check the version, names and signatures; raises ``ConfigError``."""
    check_version()
    for path, parameters in _PARAMETERS.items():
        check_parameters(path, parameters)
    if find_spec(PLAN) is not None:  # 0.5.23: slots of a step are planned once, for all who write them
        check_parameters(f"{PLAN}.KVLocPlan.bind", "self batch reader")
        check_parameters(_INPUT, "draft_token positions draft_token_num")
        if "kv_loc_plan" not in signature(find(_INPUT)).parameters:
            raise mismatch(_INPUT, "a field kv_loc_plan", list(signature(find(_INPUT)).parameters))
    dummy = read(import_module(BASE_RUNNER), "create_dummy_verify_input")
    found = signature(dummy).parameters
    wanted = {"spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker"}
    if not wanted <= set(found):
        raise mismatch(f"{BASE_RUNNER}.create_dummy_verify_input", f"parameters {sorted(wanted)}", list(found))


def draft_config(arguments: Any) -> Any:
    """Return the drafter's configuration (a ``transformers`` object)."""
    get_config = find("sglang.srt.utils.hf_transformers_utils.get_config")
    return get_config(
        arguments.speculative_draft_model_path,
        trust_remote_code=arguments.trust_remote_code,
        revision=arguments.speculative_draft_model_revision,
    )


def block_size(config: Any) -> int | None:
    """Return the block length, root included, of a DFlash drafter's configuration."""
    found: int | None = find(f"{_UTILS}.parse_dflash_draft_config")(draft_hf_config=config).block_size
    return found


def worker_class() -> type:
    """Return the class that ours extends."""
    found: type = find(WORKER)
    return found


def use_block(worker: Any, block: int) -> None:
    """Let a worker that was made for ``width`` tokens draft blocks of ``block``."""
    common = import_module(_COMMON)
    worker.block_size = block
    worker._block_pos_offsets = common.build_block_pos_offsets(length=block, device=worker.device)
    worker._draft_block_spec_info = common.make_draft_block_spec_info(draft_token_num=block, device=worker.device)
    if hasattr(worker.draft_model, "set_block_size"):  # 0.5.23
        worker.draft_model.set_block_size(block)
    deferring = getattr(worker, "_target_logits_processor", None)
    if deferring is not None:  # 0.5.23: it gathers the logits of the ranks on demand
        deferring.defer_verify_gather = False
        worker._target_logits_processor = None


def unserved(worker: Any) -> list[str]:
    """Return what the loaded models have that DDTREE does not serve."""
    runner, draft = worker.model_runner, worker.draft_model
    found = []
    if not runner.use_mla_backend:
        found.append("the target's attention is not MLA")
    if worker.page_size != 1:
        found.append(f"pages of {worker.page_size} tokens")
    for name in ("selector", "lilicorr", "_is_domino"):  # 0.5.23: drafters that pick their tokens by other means
        if getattr(worker, name, None):
            found.append(f"a drafter with {name.strip('_')}")
    head = getattr(runner.model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if weight is None or not torch.is_floating_point(weight):
        found.append("a target without a dense output head")
    shard = getattr(head, "shard_indices", None)
    if getattr(shard, "num_added_elements", 0):
        found.append("tokens added to the target's vocabulary")
    if shard is None and find("sglang.srt.distributed.get_tp_group")().world_size > 1:
        found.append("an output head that does not say which part of the vocabulary a rank holds")
    if type(draft).__name__ != "DFlashDraftModel":
        found.append(f"a draft model of class {type(draft).__name__}")
    return found


@cache
def _held(path: str) -> Any:
    """What ``find`` returns, looked up once: for names of each step that nobody replaces."""
    return find(path)


def run_draft(worker: Any, batch: Any, window: Window, ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """Run the drafter on the blocks ``ids [batch, block]``; returns SGLang's output of the forward."""
    info = import_module(_BATCH)
    embed = worker.model_runner.model.get_input_embeddings()(ids)
    scale = getattr(worker, "_noise_embed_scale", 1.0)
    embed = embed if scale == 1.0 else embed * scale
    runner = worker.draft_model_runner
    forward_batch = forward_batch_of(
        runner,
        batch,
        window.front(ids.shape[1]),
        ids,
        positions,
        input_embeds=embed.view(-1, embed.shape[-1]),
        spec_algorithm=_held(f"{INFO}.SpeculativeAlgorithm").DFLASH,
        spec_info=worker._draft_block_spec_info,
        capture_hidden_mode=info.CaptureHiddenMode.NULL,
    )
    with torch.inference_mode():
        return runner.forward(forward_batch)


def forward_batch_of(
    runner: Any, batch: Any, window: Window, ids: torch.Tensor, positions: torch.Tensor, **fields: Any
) -> Any:
    """Build SGLang's input of a verify forward of ``runner`` over ``ids [batch, tokens]`` in the window's slots."""
    info = import_module(_BATCH)
    if window.plan is not None:
        padded = torch.full((), ids.numel(), dtype=torch.int32, device=ids.device)
        fields |= {
            "num_token_non_padded": padded if info.enable_num_token_non_padded() else None,
            "global_num_token_non_padded_cpu": ids.numel(),
            "can_run_decode_cuda_graph": batch.can_run_decode_cuda_graph,
        }
    found = info.ForwardBatch(
        forward_mode=info.ForwardMode.TARGET_VERIFY,
        batch_size=len(ids),
        input_ids=ids.flatten(),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=window.lengths,
        out_cache_loc=window.slots.reshape(-1),
        seq_lens_sum=window.bound,
        seq_lens_cpu=window.bounds,
        positions=positions.flatten(),
        **fields,
    )
    if window.plan is not None:
        window.plan.bind(found, runner.kv_index_translator, cols=window.columns)
    return found


def verify_input(window: Window, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> Any:
    """Describe the trees ``ids [batch, width]`` to SGLang."""
    options = {} if window.plan is None else {"kv_loc_plan": window.plan, "kv_loc_cols": window.columns}
    return _held(_INPUT)(
        draft_token=ids.reshape(-1),
        positions=positions.reshape(-1),
        draft_token_num=ids.shape[1],
        custom_mask=mask,
        capture_hidden_mode=import_module(_BATCH).CaptureHiddenMode.FULL,
        **options,
    )


def run_verify(
    worker: Any, batch: Any, window: Window, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
) -> Any:
    """Verify the trees ``ids [batch, width]``; returns SGLang's batch result (logits, features)."""
    trees = verify_input(window, ids, positions, mask)
    batch.out_cache_loc = window.slots.reshape(-1)
    kept = batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum
    batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = window.lengths, window.bounds, window.bound
    forward_batch, _ = trees.prepare_for_verify(batch, worker.target_worker)
    batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = kept
    return worker.target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )


def mask_buffer(worker: Any, requests: int) -> torch.Tensor | None:
    """Return the mask that the captured verify graphs read, None if this batch runs without one of them."""
    found = getattr(worker.model_runner.attn_backend, "verify_mask", None)
    if found is None or not found.fits(requests):
        return None
    if found.mode.name != "FULL_MASK":
        raise mismatch("verify_mask.mode", "FULL_MASK", found.mode)
    buffer: torch.Tensor = found.buffer
    return buffer


def output_head(worker: Any) -> tuple[torch.Tensor, int, Any]:
    """Return this rank's rows of the target's output head, the token id of the first, and the group that has the rest.

    Rows that only pad are left out. The group is None without tensor parallelism.
    """
    head = worker.model_runner.model.lm_head
    group = find("sglang.srt.distributed.get_tp_group")()
    shard = getattr(head, "shard_indices", None)
    rows, first = (len(head.weight), 0) if shard is None else (shard.num_org_elements, shard.org_vocab_start_index)
    return head.weight[:rows], first, group if group.world_size > 1 else None


def kv_buffers(worker: Any) -> list[torch.Tensor]:
    """Return the buffers ``[slots, 1, 576]`` of the target's KV pool, one per layer."""
    found: list[torch.Tensor] = read(worker.model_runner.token_to_kv_pool, "kv_buffer")
    return found


def append_features(worker: Any, rows: Gathered) -> None:
    """Project packed features and write them into the drafter's KV, as DFLASH does."""
    worker._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=rows.features.flatten(0, 1),
        cache_loc=rows.slots.flatten(),
        positions=rows.positions.flatten(),
    )


def most_requests() -> int:
    """Return the largest batch that a draft graph is captured for."""
    return int(max(import_module("sglang.srt.runtime_context").get_exec().graph.cuda_graph_config.decode.bs))


def result(**fields: Any) -> Any:
    """Build what the scheduler takes back from a step."""
    return _held(_RESULT)(**fields)


def output_lengths(batch: Any) -> list[tuple[Any, int]]:
    """Return the requests of a batch that have not ended, each with the number of tokens it has given out.

    A step ahead, SGLang runs requests once more that have ended already, and takes nothing from that.
    """
    return [(req, len(req.output_ids)) for req in batch.reqs if not (req.finished() or req.is_retracted)]


def given_out(before: list[tuple[Any, int]]) -> list[int]:
    """Return how many tokens each request has given out since ``output_lengths``; what follows its end is none."""
    return [(len(req.output_ids) if req.finished_len is None else req.finished_len) - length for req, length in before]
