"""A plugin of SGLang: what stands between a CPU and a whole engine with DDTREE; nothing of the project is replaced."""

from __future__ import annotations

from ddtree_scheduler import draft_in_float32, stand_in_for_vllm


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``, called in each process of the engine."""
    stand_in_for_vllm()
    draft_in_float32()
