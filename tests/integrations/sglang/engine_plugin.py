"""A plugin of SGLang for the engine test: a speculative algorithm ``ORACLETREE`` with a draft tree of four nodes.

The tree holds a decoy, a guess and the guess's child, so the accepted path is not the front of the rows, and a chain
in its place would attend to the decoy. Guesses come from ``ORACLE_FILE`` (a list of texts), where one of them
continues the request; else they are made up. While ``BREAK_FILE`` exists, ours is called without the mask.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

PARENTS = (-1, 0, 0, 2)
DEPTHS = (0, 1, 1, 2)
NAME = "ORACLETREE"


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``."""
    import sglang.kernels.ops.speculative.cache_locs as locations
    from ddtree_scheduler import stand_in_for_vllm
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    from treeverify.integrations.sglang import calls

    stand_in_for_vllm()
    locations._is_cuda = True  # take the Triton branch on a CPU: the interpreter runs it

    class Algorithm(CustomSpecAlgo):
        def create_future_map(self, *arguments: Any, **options: Any) -> Any:
            return SpeculativeAlgorithm.create_future_map(self, *arguments, **options)

        def carries_draft_hidden_states(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, arguments: Any) -> None:
            arguments.disable_overlap_schedule = True
            arguments.speculative_num_draft_tokens = len(PARENTS)
            arguments.speculative_num_steps = arguments.speculative_eagle_topk = 2

    def worker(arguments: Any) -> type:
        from engine_worker import Worker

        return Worker

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)(worker)
    stock = calls.extend_call

    def extend_call(*arguments: Any) -> Any:
        call = stock(*arguments)
        broken = Path(os.environ["BREAK_FILE"]).exists()
        return call._replace(mask=None, mask_indptr=None) if broken else call

    calls.extend_call = extend_call


def tree() -> torch.Tensor:
    """Which nodes each node sees: ``[nodes, nodes]`` bool."""
    seen = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def guesses(text: list[int]) -> tuple[int, int]:
    """The two tokens that follow ``text``."""
    for whole in json.loads(Path(os.environ["ORACLE_FILE"]).read_text()):
        if whole[: len(text)] == text and len(whole) > len(text) + 1:
            return whole[len(text)], whole[len(text) + 1]
    return (text[-1] * 7 + 1) % 256, (text[-1] * 11 + 5) % 256
