"""Widths by cost: what is measured at the start and kept, and the graphs of each width; without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treeverify.costs import CostCache, CostTable
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError
from treeverify.integrations.sglang import modes
from treeverify.integrations.sglang.ddtree import costs, graphs

LADDER, RUN = (1, 3, 5), 4


def test_the_grid_of_a_server() -> None:
    grid = costs.grid_of(LADDER, RUN, [1, 2, 4, 8, 16], 40960, cuda=True)
    assert (grid.batches, grid.contexts) == ((1, 4, 16), (1024, 32768))
    assert costs.grid_of(LADDER, RUN, [1, 2], 4096, cuda=True).batches == (1, 2)
    assert costs.grid_of(LADDER, RUN, [1, 48], 4096, cuda=True).batches == (1, 4, 16, 48)
    assert costs.grid_of(LADDER, RUN, [1], 4096, cuda=True).contexts == (1024, 4091)
    assert costs.grid_of(LADDER, RUN, [1], 500, cuda=True).contexts == (495,)
    assert costs.grid_of(LADDER, RUN, [1], 3, cuda=False).contexts == (1,)


@pytest.fixture
def worker() -> SimpleNamespace:
    return SimpleNamespace(device="cpu")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, worker: Any, tmp_path: Any) -> list[tuple[str, int]]:
    """A server whose clock is its steps: those of n nodes take n ms, a draft 3, a run of plain steps RUN.

    Lists (mode, width) of each.
    """
    ran: list[tuple[str, int]] = []
    monkeypatch.setenv("TREEVERIFY_CACHE", str(tmp_path))
    monkeypatch.setattr(modes, "_current", modes.Switch(VerifyMode.OFF, (VerifyMode.OFF, VerifyMode.ON)))

    class Nothing:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    for name, value in {
        "captured_batches": lambda _: [1],
        "room": lambda _: 100,
        "description": lambda _: {"model": "toy"},
        "rehearsal": lambda *_: Nothing(),
        "is_first_rank": lambda: True,
        "from_first_rank": lambda held: held,
    }.items():
        monkeypatch.setattr(graphs, name, value)
    elapsed = [0.0]

    def clock(run: Any) -> float:
        before = elapsed[0]
        run()
        return elapsed[0] - before

    def step(_: Any, width: int) -> None:
        ran.append((modes.current().mode.value, width))
        assert modes.current().capturing, "it would be counted as served"
        taken = 3.0 if width == 0 else float(RUN) if width == 1 else width + 3.0
        elapsed[0] += taken + 10 * (len(ran) < 5)

    monkeypatch.setattr(costs, "_thread_ms", clock)
    worker.step = step
    return ran


def test_costs_are_measured_for_every_mode_and_kept(worker: Any, server: list[tuple[str, int]]) -> None:
    found = costs.costs_of(worker, LADDER, RUN, worker.step)
    assert set(found) == {"off", "on"}
    for each in found.values():
        assert each.draft_ms(1, 10) == 3.0
        assert [each.verify_ms(width, 1, 10) for width in LADDER] == list(LADDER)
    assert {mode for mode, _ in server} == {"off", "on"}
    assert modes.current().mode is VerifyMode.OFF
    count = len(server)
    again = costs.costs_of(worker, LADDER, RUN, worker.step)
    assert len(server) == count, "measured again"
    assert again["on"].as_json() == found["on"].as_json()


@pytest.mark.parametrize("damage", ["cut", "foreign", "ladder"])
def test_a_damaged_or_foreign_table_is_measured_anew(worker: Any, server: list[tuple[str, int]], damage: str) -> None:
    costs.costs_of(worker, LADDER, RUN, worker.step)
    key = costs._key(worker, costs.grid_of(LADDER, RUN, [1], 100, cuda=False), VerifyMode.OFF)
    path = CostCache(key).path
    assert path.is_file()
    if damage == "cut":
        path.write_text(path.read_text()[:-40])
    elif damage == "foreign":
        path.write_text(path.read_text().replace('"toy"', '"other"'))
    else:
        path.write_text(path.read_text().replace("[\n   1,\n   3,\n   5\n  ]", "[1, 3]"))
    count = len(server)
    assert costs.costs_of(worker, LADDER, RUN, worker.step)["off"].verify_ms(5, 1, 10) == 5.0
    assert {mode for mode, _ in server[count:]} == {"off"}


def test_other_ranks_take_the_first_ones_costs(
    worker: Any, server: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = CostTable(LADDER, (1,), (1,), np.array([1.0, 1.0, 7.0]).reshape(3, 1, 1), np.ones((1, 1)))
    answers = iter((None, told) * 2)
    monkeypatch.setattr(graphs, "is_first_rank", lambda: False)
    monkeypatch.setattr(graphs, "from_first_rank", lambda _: next(answers))
    assert costs.costs_of(worker, LADDER, RUN, worker.step)["on"] is told
    assert server, "all ranks measure together"
    assert not list(CostCache({}).folder.glob("*.json"))


class Graphs:
    """A graph runner that lets its backend make buffers, as SGLang's does."""

    def __init__(
        self, runner: Any, *, attn_backend: Any, speculative_num_steps: int, speculative_num_draft_tokens: int
    ):
        assert speculative_num_steps == 1
        self.captured_req_width = speculative_num_draft_tokens
        self.max_bs, self.max_num_token = runner.most, runner.most * speculative_num_draft_tokens
        attn_backend.init_cuda_graph_state(self.max_bs, self.max_num_token)


class Backend:
    made = 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.made += 1


@pytest.fixture
def captured() -> SimpleNamespace:
    runner = SimpleNamespace(most=4, attn_backend=Backend(), graph_memory_usage={"target_verify": 0.5})
    options = {"attn_backend": runner.attn_backend, "speculative_num_steps": 1}
    runner.decode_cuda_graph_runner = Graphs(runner, **options, speculative_num_draft_tokens=5)
    return SimpleNamespace(model_runner=runner)


def test_one_set_of_graphs_per_width_and_the_buffers_of_the_widest(
    captured: Any, caplog: pytest.LogCaptureFixture
) -> None:
    widest = captured.model_runner.decode_cuda_graph_runner
    caplog.set_level("INFO")
    found = graphs.capture(captured, LADDER)
    assert {width: each.captured_req_width for width, each in found.items()} == {1: 1, 3: 3, 5: 5}
    assert found[5] is widest
    assert captured.model_runner.attn_backend.made == 1
    assert "at most 0.50 GiB each, 1.00 GiB in all" in caplog.messages[0]
    graphs.use(captured, found, 3)
    assert captured.model_runner.decode_cuda_graph_runner is found[3]
    captured.model_runner.attn_backend.init_cuda_graph_state(9, 9)  # it is the backend's own again
    assert captured.model_runner.attn_backend.made == 2


def test_graphs_that_would_need_larger_buffers_are_refused(captured: Any) -> None:
    captured.model_runner.most = 5
    with pytest.raises(ConfigError, match=r"Backend\.init_cuda_graph_state: expected at most 4 requests, 20 tokens"):
        graphs.capture(captured, (1, 5))


def test_a_server_without_graphs_has_none(captured: Any) -> None:
    captured.model_runner.decode_cuda_graph_runner = None
    assert graphs.capture(captured, LADDER) == {}
    graphs.use(captured, {}, 3)
    assert captured.model_runner.decode_cuda_graph_runner is None


def test_what_is_measured_is_what_the_server_can_hold() -> None:
    pool = SimpleNamespace(req_to_token=torch.zeros(7, 200, dtype=torch.int32), size=6)
    model = SimpleNamespace(context_len=150)
    runner = SimpleNamespace(req_to_token_pool=pool, max_total_num_tokens=1000, model_config=model)
    runner.decode_cuda_graph_runner = SimpleNamespace(capture_bs=[1, 2, 4, 8])
    worker = SimpleNamespace(model_runner=runner)
    assert graphs.room(worker) == 150
    assert graphs.captured_batches(worker) == [1, 2, 4]
    runner.decode_cuda_graph_runner, runner.max_total_num_tokens = None, 40
    assert graphs.room(worker) == 40
    assert graphs.captured_batches(worker) == [6]


def test_a_rehearsal_lends_rows_and_gives_them_back() -> None:
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 12, dtype=torch.int32), size=3)
    model = SimpleNamespace(vocab_size=2)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(req_to_token_pool=pool, max_total_num_tokens=7, model_config=model)
    )
    with graphs.rehearsal(worker, 2, 5) as lent:
        assert lent.req_pool_indices.tolist() == [1, 2]
        assert pool.req_to_token.tolist() == [
            [0] * 12,
            [1, 2, 3, 4, 5] + [0] * 7,
            [6, 7, 1, 2, 3] + [0] * 7,  # within the pool, never slot 0
            [0] * 12,
        ]
        assert lent.seq_lens.tolist() == lent.seq_lens_cpu.tolist() == [5, 5]
        assert lent.spec_info.bonus_tokens.tolist() == [0, 1]
    assert not pool.req_to_token.any()
