"""One real engine of SGLang in Triton's interpreter, driven through its control requests; prints JSON.

engine_run.py MODEL        with KDTREE_VERIFY, KDTREE_VERIFY_ALLOW, ORACLE_FILE and BREAK_FILE set
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from processes import say

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [100, 101, 102]]
TOKENS = 12
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


class Run:
    """The engine, and what the test asks of it."""

    def __init__(self, model: str) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.engine = Engine(
            model_path=model,
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            attention_backend="treeverify",
            speculative_algorithm="ORACLETREE",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_cuda_graph=True,
            disable_radix_cache=True,
            triton_attention_num_kv_splits=1,
            max_total_tokens=1024,
            max_running_requests=4,
            mem_fraction_static=0.2,
            context_length=256,
            log_level="warning",
        )

    def switch(self, number: float) -> list[bool]:
        return self.engine.loop.run_until_complete(self._switch(number))

    async def _switch(self, number: float) -> Any:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        request = SetInternalStateReq(server_args={"treeverify_mode": number})
        return await self.engine.tokenizer_manager.set_internal_state(request)

    def tokens(self) -> tuple[list[list[int]], float]:
        """Texts of both prompts, and the tokens that a step of the first one accepted."""
        found = self.engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        return [one["output_ids"] for one in found], found[0]["meta_info"]["spec_accept_length"]

    def switched_in_the_middle(self, numbers: list[int]) -> list[int]:
        """Text of the first prompt, the mode switched after each piece that arrives."""

        async def play() -> list[int]:
            ids: list[int] = []
            pieces = await self.engine.async_generate(input_ids=PROMPTS[0], sampling_params=GREEDY, stream=True)
            async for piece in pieces:
                ids = piece["output_ids"]
                if numbers:
                    assert await self._switch(numbers.pop(0)) == [True]
            return ids

        return self.engine.loop.run_until_complete(play())

    def state(self) -> Any:
        return self.engine.get_server_info()["internal_states"][0]["treeverify"]


def main() -> None:
    """Off makes the texts that the drafter guesses from then on; then each mode, a switch within, a dropped mask."""
    run, found = Run(sys.argv[1]), {}
    plain, found["accept_plain"] = run.tokens()
    Path(os.environ["ORACLE_FILE"]).write_text(json.dumps([p + t for p, t in zip(PROMPTS, plain, strict=True)]))
    found["plain"] = plain
    for number, mode in enumerate(("off", "validate", "on")):
        found[f"switch_{mode}"] = run.switch(number)
        found[mode], found[f"accept_{mode}"] = run.tokens()
    found["refused"] = [run.switch(3), run.switch(1.5)]
    found["middle"] = run.switched_in_the_middle([1, 2, 0, 2])
    found["state"] = run.state()
    Path(os.environ["BREAK_FILE"]).touch()
    found["broken_on"], found["accept_broken"] = run.tokens()
    run.switch(1)
    found["broken_validate"], _ = run.tokens()
    found["broken_state"] = run.state()
    say(found)
    run.engine.shutdown()


if __name__ == "__main__":
    main()
