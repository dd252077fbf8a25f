"""A model runner that is just enough for a real attention backend of SGLang 0.5.23 on a CPU.

Real: server arguments and runtime context, MLA pool, request pool, allocator, index translator, verify input, layer,
batch. Made up: the runner, its configuration, and a model of one layer. Needs ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 6)
NODES, HEADS, CONTEXT, SLOTS = len(PARENTS), 8, 128, 512


class Runner(SimpleNamespace):
    def decode_num_tokens_per_req(self) -> int:
        return NODES


class OneLayer(torch.nn.Module):
    def __init__(self, scaling: float = 192**-0.5, **options: Any) -> None:
        super().__init__()
        self.attention = RadixAttention(HEADS, 576, scaling, 1, 0, v_head_dim=512, **options)


def tree_mask() -> torch.Tensor:
    mask = torch.eye(NODES, dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@contextmanager
def server(**changes: Any) -> Iterator[None]:
    disabled = PhaseConfig(backend=Backend.DISABLED)
    arguments: dict[str, Any] = {
        "attention_backend": "triton",
        "chunked_prefill_size": -1,
        "cuda_graph_config": CudaGraphConfig(decode=disabled, prefill=disabled),
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": NODES,
        "speculative_num_steps": 4,
        "triton_attention_num_kv_splits": 8,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
    }
    ranks = get_parallel().override(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0, dp_rank=None, tp_rank=0)
    with ranks, get_context().override_server_args(**(arguments | changes)):
        yield


def make_runner(
    requests: int,
    arch: AttentionArch = AttentionArch.MLA,
    draft: bool = False,
    speculative: bool = True,
    **layer: Any,
) -> Runner:
    dtype = torch.float32
    config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"])
    config.get_text_config = lambda: config
    model = SimpleNamespace(
        attention_arch=arch,
        context_len=CONTEXT,
        head_dim=576,
        v_head_dim=512,
        swa_v_head_dim=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        is_encoder_decoder=False,
        hf_config=config,
        linear_attn_registry_result=None,
        get_max_num_attention_heads=lambda: HEADS,
        get_num_kv_heads=lambda tp, dcp=1: 1,
    )
    requests_pool = ReqToTokenPool(size=requests, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
    pool = MLATokenToKVPool(
        size=SLOTS,
        page_size=1,
        dtype=dtype,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    allocator = TokenToKVPoolAllocator(SLOTS, dtype, "cpu", pool, False)
    translator = KVIndexTranslator(
        req_to_token=requests_pool.req_to_token,
        token_to_kv_pool_allocator=allocator,
        token_to_kv_pool=pool,
        page_size=1,
        device="cpu",
    )
    return Runner(
        device="cpu",
        dtype=dtype,
        kv_cache_dtype=dtype,
        gpu_id=0,
        page_size=1,
        sliding_window_size=None,
        is_draft_worker=draft,
        spec_algorithm=SpeculativeAlgorithm.EAGLE if speculative else SpeculativeAlgorithm.NONE,
        use_mla_backend=True,
        model_config=model,
        model=OneLayer(**layer),
        req_to_token_pool=requests_pool,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        kv_index_translator=translator,
    )


def _place(runner: Runner, prefixes: Sequence[int], drafts: int) -> torch.Tensor:
    """Fill the pool with random rows; give each request scattered slots for its prefix and ``drafts`` new rows."""
    generator = torch.Generator().manual_seed(sum(prefixes))
    buffer = runner.token_to_kv_pool.kv_buffer[0]
    buffer.copy_(torch.randn(buffer.shape, generator=generator))
    allocator, table = runner.token_to_kv_pool_allocator, runner.req_to_token_pool.req_to_token
    allocator.free_pages = allocator.free_pages[torch.randperm(allocator.available_size(), generator=generator)]
    slots = []
    for row, prefix in enumerate(prefixes, start=1):  # row 0 pads
        table[row, :prefix] = allocator.alloc(prefix).to(torch.int32)
        slots.append(allocator.alloc(drafts))
        table[row, prefix : prefix + drafts] = slots[-1].to(torch.int32)
    return torch.cat(slots)


def _batch(runner: Runner, mode: ForwardMode, prefixes: Sequence[int], new: int, lengths: torch.Tensor) -> ForwardBatch:
    """A batch of ``new`` rows per request; ``lengths`` is what SGLang calls ``seq_lens`` in this mode."""
    slots, tokens = _place(runner, prefixes, new), len(prefixes) * new
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(prefixes),
        input_ids=torch.arange(tokens),
        req_pool_indices=torch.arange(1, len(prefixes) + 1),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=slots,
        positions=torch.zeros(tokens, dtype=torch.int64),
    )


def decode_batch(runner: Runner, prefixes: Sequence[int]) -> ForwardBatch:
    """One new token per request; ``seq_lens`` counts it."""
    batch = _batch(runner, ForwardMode.DECODE, prefixes, 1, torch.tensor(prefixes) + 1)
    runner.kv_index_translator.bind_own_plan(batch)
    return batch


def extend_batch(runner: Runner, prefixes: Sequence[int]) -> ForwardBatch:
    """A draft's extend over the nodes that were just verified, a chain; ``seq_lens`` counts them."""
    batch = _batch(runner, ForwardMode.DRAFT_EXTEND_V2, prefixes, NODES, torch.tensor(prefixes) + NODES)
    batch.extend_prefix_lens = torch.tensor(prefixes)
    batch.extend_prefix_lens_cpu = list(prefixes)
    batch.extend_seq_lens = torch.full((len(prefixes),), NODES)
    batch.extend_seq_lens_cpu = [NODES] * len(prefixes)
    batch.extend_num_tokens = len(prefixes) * NODES
    runner.kv_index_translator.bind_own_plan(batch)
    return batch


def verify_batch(runner: Runner, prefixes: Sequence[int]) -> ForwardBatch:
    """A tree per request."""
    # the prefix part of a mask is never read: leave it false
    mask = [torch.cat([torch.zeros(NODES, p, dtype=torch.bool), tree_mask()], 1).flatten() for p in prefixes]
    lengths = torch.tensor(prefixes)
    batch = _batch(runner, ForwardMode.TARGET_VERIFY, prefixes, NODES, lengths)
    batch.positions = (lengths[:, None] + tree_mask().sum(1) - 1).flatten()
    batch.spec_info = EagleVerifyInput(
        draft_token=batch.input_ids,
        custom_mask=torch.cat(mask),
        positions=batch.positions,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=4,
        topk=4,
        draft_token_num=NODES,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=sum(prefixes),
        seq_lens_cpu=lengths,
    )
    runner.kv_index_translator.bind_own_plan(batch)
    return batch


def run(backend: Any, runner: Runner, batch: ForwardBatch, prepared: bool = False) -> torch.Tensor:
    """Run the layer of the model on fixed random inputs."""
    generator = torch.Generator().manual_seed(9)
    tokens = len(batch.out_cache_loc)
    q = torch.randn(tokens, HEADS, 576, generator=generator)
    k = torch.randn(tokens, 1, 576, generator=generator)
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        if not prepared:
            backend.init_forward_metadata(batch)
        out: torch.Tensor = runner.model.attention(q, k, k[..., :512], batch, save_kv_cache=True)
    live = batch.out_cache_loc != 0
    assert torch.equal(runner.token_to_kv_pool.kv_buffer[0][batch.out_cache_loc[live]], k[live]), "rows not stored"
    return out.view(tokens, HEADS, 512)
