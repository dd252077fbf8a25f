"""The parts of DDTREE that know nothing of SGLang: arguments, requests, seeds, counters, the draft's tail."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treeverify.errors import ConfigError
from treeverify.integrations.sglang.ddtree import algorithm, compat
from treeverify.integrations.sglang.ddtree.host import SGLangHost
from treeverify.integrations.sglang.ddtree.metrics import Metrics

BLOCK = 8


def arguments(**changes: Any) -> SimpleNamespace:
    values = {rule.field: rule.allowed[0] for rule in algorithm._RULES}
    values |= {
        "speculative_num_draft_tokens": 33,
        "speculative_draft_attention_backend": None,
        "speculative_draft_window_size": None,
        "max_running_requests": None,
    }
    return SimpleNamespace(**(values | changes))


def test_what_follows_is_filled_in() -> None:
    given = arguments(speculative_num_steps=None, speculative_eagle_topk=None)
    algorithm.fill(given, BLOCK, "cuda")
    assert (given.speculative_num_steps, given.speculative_eagle_topk) == (1, 1)
    assert given.speculative_draft_attention_backend is None  # chosen where the drafter's configuration is read
    assert given.max_running_requests == algorithm.MAX_RUNNING


@pytest.mark.parametrize(("block", "width"), [(8, algorithm.DEFAULT_WIDTH), (32, 32)])
def test_a_width_that_is_not_given_holds_the_block(block: int, width: int) -> None:
    given = arguments(speculative_num_draft_tokens=None)
    algorithm.fill(given, block, "cuda")
    assert given.speculative_num_draft_tokens == width


@pytest.mark.parametrize("rule", algorithm._RULES, ids=lambda rule: rule.field)
def test_each_argument_is_refused_by_name(rule: Any) -> None:
    with pytest.raises(ConfigError, match=f"DDTREE does not serve: {rule.field} is 'odd': "):
        algorithm.fill(arguments(**{rule.field: "odd"}), BLOCK, "cuda")


@pytest.mark.parametrize("width", [BLOCK - 1, 258])
def test_a_width_out_of_range_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=f"speculative_num_draft_tokens is {width}: .* block of 8 .* at most 257"):
        algorithm.fill(arguments(speculative_num_draft_tokens=width), BLOCK, "cuda")


def test_a_window_holds_the_block() -> None:
    algorithm.fill(arguments(speculative_draft_window_size=BLOCK), BLOCK, "cuda")
    with pytest.raises(ConfigError, match="speculative_draft_window_size is 7: at least the drafter's block of 8"):
        algorithm.fill(arguments(speculative_draft_window_size=BLOCK - 1), BLOCK, "cuda")


def test_all_refusals_come_at_once_and_nothing_is_changed() -> None:
    given = arguments(pp_size=2, page_size=64, max_running_requests=None)
    with pytest.raises(ConfigError, match=r"pp_size is 2.*page_size is 64.*device is 'npu'"):
        algorithm.fill(given, BLOCK, "npu")
    assert given.max_running_requests is None


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_build_for_hip_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    given = arguments(max_running_requests=None, speculative_eagle_topk=None)
    with pytest.raises(
        ConfigError, match=r"DDTREE does not serve: torch is a build for HIP \(ROCm 7.0.51831\): .*mask"
    ):
        algorithm.fill(given, BLOCK, device)
    assert (given.max_running_requests, given.speculative_eagle_topk) == (None, None)
    with pytest.raises(ConfigError, match=r"page_size is 64.*HIP"):
        algorithm.fill(arguments(page_size=64), BLOCK, device)


def request(**changes: Any) -> SimpleNamespace:
    names = {rule.field: rule.allowed[0] for rule in algorithm._SAMPLING}
    sampling = names | {name: value for name, value in changes.items() if name in names}
    rest = {rule.field: rule.allowed[0] for rule in algorithm._REQUEST}
    rest |= {name: value for name, value in changes.items() if name not in names}
    return SimpleNamespace(sampling_params=SimpleNamespace(**sampling), **rest)


@pytest.mark.parametrize("rule", [*algorithm._SAMPLING, *algorithm._REQUEST], ids=lambda rule: rule.field)
def test_each_option_of_a_request_is_refused_by_name(rule: Any) -> None:
    assert algorithm.refuse_request(request()) is None
    refusal = algorithm.refuse_request(request(**{rule.field: "odd"}))
    assert refusal == f"DDTREE does not serve: {rule.field} is 'odd': {rule.meaning}"


def test_counters() -> None:
    metrics = Metrics(17, 8)
    assert metrics.report()["acceptance_length"] is None
    metrics.step(2, 17)
    begin = time.perf_counter()
    metrics.spent("verify", metrics.spent("draft", begin - 2) - 3)
    metrics.accept([1, 5])
    report = metrics.report()
    assert (report["steps"], report["request_steps"], report["nodes"]) == (1, 2, 34)
    assert report["acceptance_length"] == 3.0
    assert report["acceptance_lengths"] == {"1": 1, "5": 1}
    assert report["host_seconds"]["draft"] >= 2  # type: ignore[index]
    assert report["host_seconds"]["verify"] >= 3  # type: ignore[index]
    assert report["host_seconds"]["commit"] == 0  # type: ignore[index]


def host(**changes: Any) -> SGLangHost:
    """A worker's host with blocks of 3 and trees of 4."""
    return SGLangHost(SimpleNamespace(device="cpu", _mask_token_id=9, **changes), 3, 4, None)


def seeds(served: SGLangHost, **requests: int | None) -> list[int]:
    """Seeds that a batch of these requests gets, by name."""
    found = [
        SimpleNamespace(rid=name, sampling_params=SimpleNamespace(sampling_seed=seed))
        for name, seed in requests.items()
    ]
    return served.seeds(SimpleNamespace(reqs=found)).tolist()


def test_a_name_that_comes_again_with_another_seed_gets_that_one() -> None:
    served = host()
    assert seeds(served, a=5) == [5]
    assert seeds(served, a=6) == [6]
    assert seeds(served, a=6, b=7) == [6, 7]


def test_a_root_that_is_no_token_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that were NaN end a walk with -1, and under overlap scheduling a step runs before SGLang sees it."""
    pool = SimpleNamespace(req_to_token=torch.arange(40, dtype=torch.int32).view(4, 10))
    runner = SimpleNamespace(req_to_token_pool=pool)
    served, seen = host(model_runner=runner, _draft_sampler=None, use_compact_draft_cache=False), []
    output = SimpleNamespace(can_run_graph=False, logits_output=SimpleNamespace(hidden_states=None))
    monkeypatch.setattr(compat, "run_draft", lambda *arguments: seen.extend(arguments[2:]) or output)
    served._tail = lambda *_: None  # type: ignore[assignment]
    served._tail.reserve, served._tail.trees = lambda _: None, lambda _: "trees"  # type: ignore
    lengths = torch.tensor([2, 5])
    batch = SimpleNamespace(req_pool_indices=torch.tensor([3, 1]), seq_lens=lengths, seq_lens_cpu=lengths)
    batch.spec_info = SimpleNamespace(bonus_tokens=torch.tensor([-1, 8]))
    window = served.open(batch, drafts=True)
    assert served.draft(batch, window) == "trees"  # type: ignore[comparison-overlap]
    drafted, ids, positions = seen
    assert ids.tolist() == [[0, 9, 9], [8, 9, 9]]
    assert positions.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert window.slots.tolist() == [[32, 33, 34, 35], [15, 16, 17, 18]]
    assert drafted.front(3).slots.tolist() == [[32, 33, 34], [15, 16, 17]]
    assert window.front(2).slots.tolist() == [[32, 33], [15, 16]]
    assert served.open(batch, drafts=True).slots.data_ptr() == window.slots.data_ptr(), "a step made new buffers"
