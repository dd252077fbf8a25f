"""The worker of ``engine_plugin``'s algorithm: draft, verify with SGLang's target, accept greedily, move the path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from engine_plugin import DEPTHS, PARENTS, guesses, tree
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache

NODES, WIDTH = len(PARENTS), max(DEPTHS) + 1


@dataclass
class State(SpecInput):
    """What goes from step to step: the next root of each request."""

    bonus_tokens: torch.Tensor

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)

    def filter_batch(self, new_indices: torch.Tensor, **_: Any) -> None:
        self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: State) -> None:
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])


class Worker(BaseSpecWorker):
    """No draft model, no draft KV."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any, **_: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._texts: dict[str, list[int]] = {}

    @property
    def target_worker(self) -> Any:
        return self._target_worker

    @property
    def draft_worker(self) -> None:
        return None

    def clear_cache_pool(self) -> None:
        return None

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None) -> Any:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = self._target_worker.forward_batch_generation(batch)
            result.new_seq_lens = batch.seq_lens
            if on_publish:
                on_publish(result.new_seq_lens)
            result.next_draft_input = State(result.next_token_ids.to(torch.int64))
            return result
        return self._verify(batch, on_publish)

    def _verify(self, batch: Any, on_publish: Any) -> Any:
        drafts, lengths = self._draft(batch), batch.seq_lens.tolist()
        mask = [torch.cat([torch.ones(NODES, n, dtype=torch.bool), tree()], 1).flatten() for n in lengths]
        batch.spec_info = EagleVerifyInput(
            draft_token=torch.tensor(drafts).flatten(),
            custom_mask=torch.cat(mask),
            positions=torch.cat([torch.tensor(DEPTHS) + n for n in lengths]),
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=max(DEPTHS),
            topk=2,
            draft_token_num=NODES,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            seq_lens_sum=sum(lengths),
            seq_lens_cpu=batch.seq_lens_cpu,
        )
        forward, _ = eagle_prepare_for_verify(batch.spec_info, batch.req_to_token_pool, batch, self._target_worker)
        out = self._target_worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
        best = out.logits_output.next_token_logits.argmax(-1).view(-1, NODES).tolist()
        paths = [_accept(*pair) for pair in zip(drafts, best, strict=True)]
        for request, path, tokens in zip(batch.reqs, paths, drafts, strict=True):
            self._texts[request.rid] += [tokens[node] for node in path]
        index = torch.full((len(paths), WIDTH), -1, dtype=torch.int32)
        ids = torch.zeros(len(paths), NODES, dtype=torch.int32)
        for row, path in enumerate(paths):
            index[row, : len(path)] = torch.tensor(path) + row * NODES
            ids[row, : len(path)] = torch.tensor([best[row][node] for node in path])
        accepted = torch.tensor([len(path) for path in paths], dtype=torch.int32)
        move_accept_tokens_to_target_kvcache(batch, index, accepted - 1, batch.token_to_kv_pool_allocator)
        if on_publish:
            on_publish(batch.seq_lens + accepted)
        return GenerationBatchResult(
            logits_output=out.logits_output,
            next_token_ids=ids.flatten(),
            can_run_cuda_graph=False,
            accept_lens=accepted,
            new_seq_lens=batch.seq_lens + accepted,
            next_draft_input=State(torch.tensor([row[path[-1]] for row, path in zip(best, paths, strict=True)])),
            speculative_num_draft_tokens=NODES,
        )

    def _draft(self, batch: Any) -> list[list[int]]:
        rows = []
        for request, root in zip(batch.reqs, batch.spec_info.bonus_tokens.tolist(), strict=True):
            first, second = guesses([*self._texts.setdefault(request.rid, list(request.origin_input_ids)), root])
            rows.append([root, (first + 1) % 256, first, second])
        return rows


def _accept(tokens: list[int], best: list[int]) -> list[int]:
    """Walk down the nodes that are the target's choice."""
    path = [0]
    while True:
        below = [n for n, parent in enumerate(PARENTS) if parent == path[-1] and tokens[n] == best[path[-1]]]
        if not below:
            return path
        path.append(below[0])
