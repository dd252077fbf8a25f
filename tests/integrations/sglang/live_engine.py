"""What test_live_engine.py looks at: SGLang's own Engine, asked as a client asks. Prints one JSON object.

live_engine.py tree FOLDER           the requests below with DDTREE
live_engine.py retract FOLDER        some of them with DDTREE, in a small pool, requests taken back now and then
live_engine.py plain FOLDER DRAWN    the same requests without speculation, and the odds of the texts in the file DRAWN
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.integrations.sglang.ddtree_pair import BLOCK, VOCAB
from tests.integrations.sglang.processes import say

WIDTH, NEW, LONG, CHUNK = 9, 20, 100, 8
PROMPTS = [[(7 * i * i + 3 * j + j * j * i + i) % (VOCAB - 1) for j in range(6 + 5 * i)] for i in range(3)]
SEEDS, TOP_K = (5, 5, 5, 5, 6, 7), 2
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
COLD = GREEDY | {"temperature": 1e-3, "sampling_seed": 3}
"""Drawn, but from a law that leaves only the best token."""


class Client:
    """An engine and requests to it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        from sglang.srt.entrypoints.engine import Engine

        arguments: dict[str, Any] = {
            "model_path": str(folder / "target"),
            "device": "cpu",
            "dtype": "float32",
            "random_seed": 1,
            "skip_tokenizer_init": True,
            "attention_backend": "treeverify",
            "triton_attention_num_kv_splits": 1,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "chunked_prefill_size": CHUNK,
            "max_total_tokens": 1024,
            "max_running_requests": 4,
            "mem_fraction_static": 0.2,
            "context_length": 256,
            "log_level": "warning",
        }
        self.engine = Engine(**(arguments | changes))

    def ask(self, prompts: list[list[int]], sampling: Any = GREEDY, **options: Any) -> list[dict[str, Any]]:
        """Answers to requests that run together."""
        found: list[dict[str, Any]] = self.engine.generate(input_ids=prompts, sampling_params=sampling, **options)
        return found

    def texts(self, prompts: list[list[int]], sampling: Any = GREEDY) -> list[list[int]]:
        """Their texts."""
        return [answer["output_ids"] for answer in self.ask(prompts, sampling)]

    def abort_one_of_two(self) -> list[dict[str, Any]]:
        """Answers to a request and to its neighbour, which is aborted as soon as a part of its text is there."""

        async def follow(rid: str, prompt: list[int], tokens: int, abort: bool) -> Any:
            answer = None
            sampling = GREEDY | {"max_new_tokens": tokens}
            pieces = await self.engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True, rid=rid)
            async for answer in pieces:
                if abort and len(answer["output_ids"]) > 1:
                    self.engine.tokenizer_manager.abort_request(rid)
            return answer

        async def both() -> list[Any]:
            return await asyncio.gather(
                follow("kept", PROMPTS[0], NEW, abort=False), follow("gone", PROMPTS[1], LONG, abort=True)
            )

        return self.engine.loop.run_until_complete(both())

    def after_a_prefix(self, text: list[int]) -> dict[str, Any]:
        """The answer to a prompt that goes on from a part of ``text``, the answer to the last prompt."""
        (answer,) = self.ask([PROMPTS[2] + text[:4] + [1, 2]])
        return {"text": answer["output_ids"], "cached": answer["meta_info"]["cached_tokens"]}

    def state(self) -> dict[str, Any]:
        """What the server says of the plugin, and of its way of scheduling."""
        found = self.engine.get_server_info()["internal_states"][0]
        return {name: found[name] for name in ("ddtree", "treeverify", "disable_overlap_schedule")}


def with_trees(folder: Path, **changes: Any) -> Client:
    """An engine with DDTREE."""
    return Client(
        folder,
        speculative_algorithm="DDTREE",
        speculative_draft_model_path=str(folder / "drafter"),
        speculative_num_draft_tokens=WIDTH,
        **changes,
    )


def tree(folder: Path) -> dict[str, Any]:
    """All kinds of requests, one after another: what one leaves behind, the next would meet."""
    client = with_trees(folder)
    together = client.texts(PROMPTS)
    found: dict[str, Any] = {
        "together": together,
        "after_a_prefix": client.after_a_prefix(together[2]),
        "cold": client.texts(PROMPTS, COLD),
        "mixed": client.texts(PROMPTS, [GREEDY, COLD, GREEDY]),
    }
    sampling = [GREEDY | {"temperature": 1.0, "top_k": TOP_K, "sampling_seed": seed} for seed in SEEDS]
    found["drawn"] = client.texts([PROMPTS[1]] * len(SEEDS), sampling)
    kept, gone = client.abort_one_of_two()
    found["kept"], found["gone"] = kept["output_ids"], [gone["meta_info"]["finish_reason"], len(gone["output_ids"])]
    found["after_the_abort"] = client.texts(PROMPTS)
    found["state"] = client.state()
    client.engine.shutdown()
    return found


def retract(folder: Path) -> dict[str, Any]:
    """Needs ``SGLANG_TEST_RETRACT``."""
    client = with_trees(folder, max_total_tokens=256, disable_overlap_schedule=True)
    answers = client.ask(PROMPTS, [GREEDY, COLD, GREEDY])
    found = {
        "together": [answer["output_ids"] for answer in answers],
        "retractions": sum(answer["meta_info"]["num_retractions"] for answer in answers),
        "state": client.state(),
    }
    client.engine.shutdown()
    return found


def plain(folder: Path, drawn: Path) -> dict[str, Any]:
    """What is expected of the others."""
    client = Client(folder)
    together = client.texts(PROMPTS)
    found = {"together": together, "after_a_prefix": client.after_a_prefix(together[2])}
    texts = json.loads(drawn.read_text())
    answers = client.ask(
        [PROMPTS[1] + text for text in texts],
        GREEDY | {"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=len(PROMPTS[1]) - 1,
        top_logprobs_num=TOP_K,
    )
    found["odds"] = [
        {
            "token": answer["meta_info"]["input_token_logprobs"][1:],
            "best": answer["meta_info"]["input_top_logprobs"][1:],
        }
        for answer in answers
    ]
    client.engine.shutdown()
    return found


if __name__ == "__main__":
    assert BLOCK < WIDTH
    name, *paths = sys.argv[1:]
    say({run.__name__: run for run in (plain, tree, retract)}[name](*map(Path, paths)))
