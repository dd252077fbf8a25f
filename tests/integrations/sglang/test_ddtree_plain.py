"""Runs of plain steps in the worker, and the clock of served steps; without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treeverify.integrations.sglang.ddtree import compat, worker
from treeverify.integrations.sglang.ddtree.host import SGLangHost
from treeverify.integrations.sglang.ddtree.metrics import Metrics
from treeverify.integrations.sglang.ddtree.served import FORGOTTEN, KEPT, LEAST, Clock, Kind, size_of
from treeverify.ops.feature_gather.contract import Gathered
from treeverify.step.plain import run_of
from treeverify.step.step import Step

BLOCK, WIDTH, DIM, VOCAB = 6, 9, 3, 50
RUN = run_of(BLOCK)


def follows(token: int, position: int) -> int:
    """What a toy target gives after a token."""
    return (7 * token + 3 * position + 1) % VOCAB


class Toy:
    """Steps of a worker around a toy target, whose outputs share one buffer, as those of a graph do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = SimpleNamespace(req_to_token=torch.arange(120, dtype=torch.int32).view(4, 30))
        self.worker = SimpleNamespace(
            device="cpu",
            _mask_token_id=0,
            _make_next_draft_input_decode=lambda **given: SimpleNamespace(**given),
            model_runner=SimpleNamespace(req_to_token_pool=pool, attn_backend=None),
        )
        monkeypatch.setattr(SGLangHost, "append", lambda _, rows: self.append(rows))
        host = SGLangHost(self.worker, BLOCK, WIDTH, None)
        self.step: Step[Any, Any] = Step(host, BLOCK, Metrics(WIDTH, BLOCK).spent)
        self.hidden, self.logits = torch.empty(0), torch.empty(0)
        self.verified: list[tuple[list[int], ...]] = []
        self.appended: list[Gathered] = []
        self.published: list[list[int]] = []
        monkeypatch.setattr(compat, "run_verify", self.verify)
        monkeypatch.setattr(compat, "result", lambda **fields: SimpleNamespace(**fields))

    def verify(self, _: Any, batch: Any, window: Any, ids: Any, positions: Any, mask: torch.Tensor) -> Any:
        assert mask.view(torch.uint8).all()
        assert len(mask) >= len(ids) * (1 + int(positions.max()))
        assert positions.tolist() == window.lengths.tolist()
        assert (window.bounds >= window.lengths + 1).all()
        assert (window.columns.start, window.columns.stop) == (len(self.verified), len(self.verified) + 1)
        self.verified.append((ids[:, 0].tolist(), window.lengths.tolist(), window.slots[:, 0].tolist()))
        if len(self.hidden) != len(ids):
            self.hidden, self.logits = torch.empty(len(ids), DIM), torch.empty(len(ids), VOCAB)
        self.logits.zero_()
        for row, (token, position) in enumerate(zip(ids[:, 0].tolist(), positions.tolist(), strict=True)):
            self.hidden[row] = float(1000 * position + token)
            self.logits[row, follows(token, position)] = 1.0
        output = SimpleNamespace(hidden_states=self.hidden, next_token_logits=self.logits)
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=True)

    def append(self, rows: Gathered) -> None:
        self.appended.append(Gathered(*(tensor.clone() for tensor in vars(rows).values())))

    def run(self, lengths: list[int], roots: list[int], run: int = RUN) -> Any:
        batch = SimpleNamespace(
            req_pool_indices=torch.arange(1, 1 + len(roots)),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            spec_info=SimpleNamespace(bonus_tokens=torch.tensor(roots)),
            sampling_info=None,
        )
        return self.step.plain(batch, run, lambda lengths: self.published.append(lengths.tolist()))


@pytest.mark.parametrize("run", [1, 2, RUN])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_run_is_plain_decoding(monkeypatch: pytest.MonkeyPatch, requests: int, run: int) -> None:
    toy, lengths, roots = Toy(monkeypatch), [5, 8, 2][:requests], [3, 4, 49][:requests]
    found = toy.run(lengths, roots, run=run)
    wanted, fed = [], []
    for length, root in zip(lengths, roots, strict=True):
        text = [root]
        for place in range(run):
            text.append(follows(text[-1], length + place))
        wanted.append(text[1:])
        fed.append(text[:-1])
    assert found.next_token_ids.view(requests, run).tolist() == wanted
    assert found.accept_lens.tolist() == [run] * requests
    assert found.speculative_num_draft_tokens == run
    assert found.next_draft_input.bonus_tokens.tolist() == [text[-1] for text in wanted]
    after = [length + run for length in lengths]
    assert found.new_seq_lens.tolist() == found.next_draft_input.new_seq_lens.tolist() == after
    assert toy.published == [after]
    assert [ids for ids, _, _ in toy.verified] == [[row[place] for row in fed] for place in range(run)]
    table = toy.worker.model_runner.req_to_token_pool.req_to_token.tolist()
    own = [[table[1 + row][length + place] for place in range(run)] for row, length in enumerate(lengths)]
    assert [slots for _, _, slots in toy.verified] == [[row[place] for row in own] for place in range(run)]
    (rows,) = toy.appended
    assert rows.slots[:, :run].tolist() == own
    for row, length in enumerate(lengths):
        positions = list(range(length, length + run))
        assert rows.positions[row, :run].tolist() == positions
        kept = [float(1000 * p + token) for p, token in zip(positions, fed[row], strict=True)]
        assert rows.features[row, :run, 0].tolist() == kept, "a later step overwrote what an earlier one gave"
    assert not rows.slots[:, run:].any(), "beyond the run is padding"
    assert found.logits_output.hidden_states is None


class Learned:
    """Stands for the choice of widths: every outcome is that of a run, or none is."""

    def __init__(self, run: bool) -> None:
        self.run = run

    def verified(self, _: list[int]) -> bool:
        return self.run

    def report(self) -> None: ...


@pytest.mark.parametrize(("run", "counts"), [(True, {}), (False, {"2": 1, "4": 1})])
def test_tokens_of_a_run_are_not_counted_as_accepted_drafts(run: bool, counts: dict[str, int]) -> None:
    steps = object.__new__(worker.Steps)
    steps.auto, steps.metrics = Learned(run), Metrics(WIDTH, BLOCK)  # type: ignore[assignment]
    steps.verified([3, 3])
    steps.metrics.accept([4, 2])  # the second text ended inside its path
    assert steps.metrics.report()["acceptance_lengths"] == counts


def kind(rung: int) -> Kind:
    return Kind("on", 4, rung)


def timed(clock: Clock, rungs: str, step_s: float = 0.004, begin: float = 0.0) -> float:
    """Steps of 4 ms that were measured as 1 ms; returns when the next one begins."""
    for rung in rungs:
        clock.end(begin)
        clock.begin(kind(int(rung)), 1.0, begin)
        begin += step_s
    return begin


def test_a_step_counts_if_the_two_before_it_were_alike() -> None:
    clock = Clock()
    begin = timed(clock, "1" * (LEAST + 2))
    assert clock.medians() == {}, "the last has not ended"
    assert clock.end(begin), "it is not told when a kind is seen"
    assert clock.medians() == pytest.approx({kind(1): 3.0})
    clock = Clock()
    begin = timed(clock, "1112" * LEAST)
    assert not clock.end(begin), "told again"
    assert clock.medians() == pytest.approx({kind(1): 3.0})
    clock = Clock()
    timed(clock, "1121122112" * LEAST)
    assert clock.medians() == {}


def test_what_is_interrupted_does_not_count() -> None:
    clock = Clock()
    begin = 0.0
    for _ in range(2 * LEAST):
        begin = timed(clock, "111", begin=begin + 9.0)
        clock.interrupt()
    assert clock.medians() == {}


def test_the_median_of_the_latest_steps_counts() -> None:
    clock = Clock()
    begin = timed(clock, "0" * 40)
    begin = timed(clock, "0", step_s=5.0, begin=begin)  # somebody else's second
    timed(clock, "0" * 3, begin=begin)
    assert clock.medians() == pytest.approx({kind(0): 3.0})
    timed(clock, "0" * (KEPT + 3), step_s=0.002, begin=begin)
    assert clock.medians() == pytest.approx({kind(0): 1.0})


def test_a_kind_that_is_not_seen_again_is_forgotten() -> None:
    clock = Clock()
    begin = timed(clock, "1" * (LEAST + 3))
    begin = timed(clock, "0" * (FORGOTTEN - 8), begin=begin)
    assert set(clock.medians()) == {kind(0), kind(1)}
    timed(clock, "0" * 16, begin=begin)
    assert set(clock.medians()) == {kind(0)}


def test_sizes_are_powers_of_two() -> None:
    assert [size_of(requests) for requests in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [1, 2, 4, 4, 8, 8, 16, 16, 32]
