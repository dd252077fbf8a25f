"""Widths by cost: the ladder, the choice, and what a step learns from; without SGLang."""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treeverify.costs import CostTable
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError
from treeverify.integrations.sglang import modes
from treeverify.integrations.sglang.ddtree import algorithm, auto, choice, graphs, served
from treeverify.integrations.sglang.ddtree.ladder import ladder_of
from treeverify.integrations.sglang.ddtree.served import Kind
from treeverify.tree.budget import SHORTEST_PAUSE

LADDER, RUN = (1, 3, 5), 4
EVEN = np.array([2.0, 1.0, 0.5, 0.25, 0.125])  # of two requests: path probabilities of the root and four nodes


def table(verify: tuple[float, float, float], draft: float = 1.0, batches: tuple[int, ...] = (1,)) -> CostTable:
    cells = np.array(verify, dtype=np.float64).reshape(-1, 1, 1).repeat(len(batches), 1)
    return CostTable(LADDER, batches, (1,), cells, np.full((len(batches), 1), draft))


@pytest.fixture
def by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_BUDGET", "auto")


def test_without_the_variable_widths_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ladder_of(8, 33) is None
    monkeypatch.setenv("KDTREE_LADDER", "1,33")
    with pytest.raises(ConfigError, match="KDTREE_LADDER: expected to be unset without KDTREE_BUDGET=auto; got '1,33'"):
        ladder_of(8, 33)


@pytest.mark.parametrize("text", ["", "on", "AUTO", "16"])
def test_another_budget_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KDTREE_BUDGET", text)
    with pytest.raises(ConfigError, match=f"KDTREE_BUDGET: expected auto, or to be unset; got '{text}'"):
        ladder_of(8, 33)


@pytest.mark.parametrize(
    ("block", "top", "expected"),
    [
        (8, 65, (1, 5, 8, 17, 33, 65)),
        (8, 33, (1, 5, 8, 17, 33)),
        (8, 8, (1, 5, 8)),
        (2, 3, (1, 2, 3)),
        (2, 2, (1, 2)),
        (16, 65, (1, 5, 9, 16, 33, 65)),
        (8, 40, (1, 5, 8, 17, 40)),
        (8, 257, (1, 5, 8, 17, 33, 65, 129, 257)),
    ],
)
def test_the_default_ladder(by_cost: None, block: int, top: int, expected: tuple[int, ...]) -> None:
    assert ladder_of(block, top) == expected


def test_a_ladder_that_is_given(by_cost: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_LADDER", "1,2,33")
    assert ladder_of(8, 33) == (1, 2, 33)


@pytest.mark.parametrize("text", ["", "1,,33", "2,33", "1,9,9,33", "1,33,9", "1, 33", "1,x", "0,33", "-1,33"])
def test_a_bad_ladder_is_refused(by_cost: None, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KDTREE_LADDER", text)
    with pytest.raises(ConfigError, match=r"KDTREE_LADDER: expected rising integers that begin with 1, .*; got "):
        ladder_of(8, 33)


@pytest.mark.parametrize(("text", "top"), [("1,9,17", 33), ("1,65", 33), ("1", 1)])
def test_a_ladder_ends_with_the_width_of_the_draft(
    by_cost: None, monkeypatch: pytest.MonkeyPatch, text: str, top: int
) -> None:
    monkeypatch.setenv("KDTREE_LADDER", text)
    with pytest.raises(ConfigError, match=f"its last width to be --speculative-num-draft-tokens, {top}; got {text}"):
        ladder_of(8, top)


def test_a_bad_setting_stops_the_server_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_BUDGET", "cheap")
    given = SimpleNamespace(**{rule.field: rule.allowed[0] for rule in algorithm._RULES})
    given.speculative_num_draft_tokens, given.speculative_draft_attention_backend = 33, None
    given.max_running_requests = None
    with pytest.raises(ConfigError, match="KDTREE_BUDGET"):
        algorithm.fill(given, 8, "cuda")
    assert given.max_running_requests is None


def drafted(chooser: choice.Choice, drafts: list[int], probabilities: np.ndarray = EVEN) -> int:
    """One step and its outcome; the width."""
    plan = chooser.plan(len(drafts), 10, "off")
    if plan.width > 1:
        chooser.observe(plan, drafts, probabilities)
    return plan.width


@pytest.mark.parametrize(
    ("verify", "expected"),
    [((1.0, 1.0, 1.0), 5), ((1.0, 1.1, 9.0), 3), ((1.0, 2.0, 2.2), 5)],
)
def test_the_width_has_the_most_expected_tokens_per_millisecond(
    verify: tuple[float, float, float], expected: int
) -> None:
    """Mass of 3 nodes 0.75, of 5 nodes 0.9375; the draft costs 0.1."""
    chooser = choice.Choice({"off": table(verify, draft=0.1)}, 1)
    rates = {3: 1.75 / (verify[1] + 0.1), 5: 1.9375 / (verify[2] + 0.1)}
    assert max(rates, key=rates.__getitem__) == expected
    assert drafted(chooser, [1, 1]) == LADDER[1]  # nothing is known yet
    assert drafted(chooser, [1, 1]) == expected


def test_the_average_of_the_requests_counts_not_their_sum() -> None:
    """Ten requests alike choose what one chooses."""
    for requests in (1, 10):
        chooser = choice.Choice({"off": table((1.0, 1.3, 1.5), draft=0.1)}, 1)
        drafted(chooser, [1] * requests, EVEN / 2 * requests)
        assert drafted(chooser, [1] * requests, EVEN / 2 * requests) == 3


def test_each_mode_has_its_own_costs() -> None:
    chooser = choice.Choice({"off": table((1.0, 1.0, 9.0)), "on": table((1.0, 1.0, 1.0))}, 1)
    drafted(chooser, [1, 1])
    assert chooser.plan(2, 10, "off").width == 3
    assert chooser.plan(2, 10, "on").width == 5


def test_a_draft_that_is_never_accepted_is_soon_left_out() -> None:
    chooser = choice.Choice({"off": table((1.0, 2.0, 3.0))}, 1)
    widths = [drafted(chooser, [0, 0]) for _ in range(1000)]
    assert sum(width > 1 for width in widths) < 25
    assert chooser.report()["pauses"] >= 5
    assert chooser.report()["calibration"] < 1


def test_what_was_launched_before_a_pause_does_not_lengthen_it() -> None:
    """Overlap scheduling: outcomes come one step late."""
    chooser, waiting, widths = choice.Choice({"off": table((1.0, 2.0, 3.0))}, 1), [], []
    for _ in range(200):
        plan = chooser.plan(2, 10, "off")
        widths.append(plan.width)
        if waiting and waiting[0].width > 1:
            chooser.observe(waiting[0], [0, 0], EVEN)
        waiting = [plan]
    text = "".join("d" if width > 1 else "." for width in widths)
    first = text.index(".")
    waits = "."  # one try, whose outcome is waited for
    assert text[first:].startswith("." * SHORTEST_PAUSE + "d" + waits + "." * 2 * SHORTEST_PAUSE + "d")


WIDE = (1, 5, 8, 17, 33)


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("trust", [0.5, 2.0])
@pytest.mark.parametrize(
    ("verify", "draft", "drafted_tokens", "best"),
    [
        ((1.0, 1.02, 1.03, 1.05, 1.1), 0.1, 2.0, 33),
        ((1.0, 1.1, 1.2, 2.0, 4.0), 0.3, 3.0, 8),
        ((1.0, 2.0, 3.0, 5.0, 9.0), 1.0, 0.3, 1),
        ((1.0, 1.3, 1.4, 1.6, 2.2), 0.5, 0.6, 1),
    ],
)
def test_it_loses_little_to_the_best_fixed_width(
    verify: tuple[float, ...], draft: float, drafted_tokens: float, best: int, trust: float, requests: int
) -> None:
    """3,000 steps, outcomes one step late; the drafter's probabilities are off by ``trust`` and by noise."""
    numbers = np.random.default_rng(3)
    cells = np.array(verify).reshape(-1, 1, 1)
    chooser = choice.Choice({"off": CostTable(WIDE, (1,), (1,), cells, np.full((1, 1), draft))}, 1)
    nodes = np.arange(1, WIDE[-1]) ** -1.1
    nodes *= drafted_tokens / nodes.sum()
    milliseconds = {width: ms + draft * (width > 1) for width, ms in zip(WIDE, verify, strict=True)}
    rates = {width: (1 + nodes[: width - 1].sum()) / milliseconds[width] for width in WIDE}
    assert max(rates, key=rates.__getitem__) == best
    tokens, spent, waiting = 0.0, 0.0, []
    for _ in range(3000):
        plan = chooser.plan(requests, 10, "off")
        drafts = numbers.poisson(nodes[: plan.width - 1].sum(), requests)
        told = np.concatenate(([1.0], nodes * trust * np.exp(numbers.normal(0, 0.3)))) * requests
        tokens, spent = tokens + 1 + drafts.mean(), spent + milliseconds[plan.width]
        if waiting and waiting[0].width > 1:
            chooser.observe(*waiting)
        waiting = [plan, drafts.tolist(), told]
    assert tokens / spent > 0.96 * rates[best]


def test_an_unlucky_stretch_of_a_draft_that_is_expected_to_pay_is_borne() -> None:
    """The width is certain by the drafter; nothing is accepted for three steps after fifty that were."""
    chooser, certain = choice.Choice({"off": table((1.0, 1.9, 1.9), draft=0.0)}, 1), np.full(5, 2.0)
    for _ in range(50):
        assert drafted(chooser, [1, 1], certain) > 1
    for _ in range(3):
        assert drafted(chooser, [0, 0], certain) > 1
    assert chooser.report()["gain"] < 1  # type: ignore[operator]
    assert drafted(chooser, [1, 1], certain) > 1


def test_a_pause_is_one_of_batches_of_a_size() -> None:
    """Sizes are powers of two; a pause goes on when a batch of its size comes again."""
    for now, pausing in ((5, True), (8, True), (9, False), (4, False), (16, False)):
        chooser = choice.Choice({"off": table((1.0, 2.0, 3.0))}, 1)
        while drafted(chooser, [0] * 8, 4 * EVEN) > 1:
            pass
        assert (chooser.plan(now, 10, "off").width == 1) is pausing
        assert chooser.plan(8, 10, "off").width == 1
        assert chooser.report()["pauses"] == 1


def test_what_steps_take_in_service_corrects_their_costs() -> None:
    """By mode, size and rung; what was not seen takes what was measured, or most of the least that was."""
    chooser = choice.Choice({"off": table((1.0, 2.0, 3.0)), "on": table((1.0, 2.0, 3.0))}, RUN)

    def costs(requests: int, mode: str) -> list[float]:
        return chooser._prices_of((mode, requests, 10)).step_ms.tolist()

    before = [1.0, 3.0, 4.0]
    assert costs(4, "on") == before
    chooser.correct({Kind("on", 4, 0): 2.0, Kind("on", 4, 2): 4.0})
    assert costs(4, "on") == [1.0 + 2.0 / RUN, choice.LEAST_UNSEEN * (RUN + 2.0), 4.0 + 4.0]
    assert costs(3, "on") == costs(4, "on")
    assert costs(4, "off") == costs(2, "on") == costs(5, "on") == before
    assert chooser._prices_of(("on", 4, 10)).relative == (1.0, 0.8 * 6.0 / 1.5, 8.0 / 1.5)
    assert chooser.report()["served_ms"] == [
        {"mode": "on", "requests": 4, "width": 1, "beyond_measured": 2.0},
        {"mode": "on", "requests": 4, "width": 5, "beyond_measured": 4.0},
    ]
    chooser.correct({Kind("on", 4, rung): -9.0 for rung in range(3)})
    assert costs(4, "on") == [0.25 * ms for ms in before], "a quarter is left at least"


@pytest.mark.parametrize(("plain_ms", "run"), [(1.0, 4), (2.0, 4), (2.5, 3), (4.0, 2), (5.0, 1), (30.0, 1)])
def test_runs_of_slow_steps_are_short(plain_ms: float, run: int) -> None:
    """Nobody is kept waiting for longer than ``RUN_MS``, or a step."""
    chooser = choice.Choice({"off": table((plain_ms, 9 * plain_ms, 9 * plain_ms))}, RUN)
    while (plan := chooser.plan(1, 10, "off")).width > 1:
        assert plan.run == 1
        chooser.observe(plan, [0], EVEN / 2)
    assert plan.run == run
    assert plan.measured_ms == run * plain_ms
    assert chooser._prices_of(("off", 1, 10)).step_ms[0] == plain_ms
    assert chooser.widths[1] == run


def test_a_run_counts_as_its_steps() -> None:
    chooser = choice.Choice({"off": table((1.0, 9.0, 9.0))}, RUN)
    for _ in range(200):
        drafted(chooser, [0, 0])
    widths = chooser.report()["widths"]
    assert widths["1"] % RUN == 0  # type: ignore[index]
    assert widths["1"] // RUN + widths["3"] + widths["5"] == 200  # type: ignore[index]


@pytest.mark.parametrize(
    ("verify", "taking", "hosts", "tokens", "best"),
    [
        ((1.0, 1.8, 1.9), add, 2.0, 1.3, 1),  # by the costs of the start a tree would pay
        ((1.0, 1.0, 1.0), add, 2.0, 2.5, 5),
        ((1.0, 1.2, 3.0), add, 0.0, 2.5, 3),
        ((1.0, 1.2, 3.0), add, 8.0, 4.0, 5),  # by the costs of the start a narrower tree would pay more
        ((1.0, 1.2, 1.5), max, 4.5, 2.4, 1),  # a run that was never seen is not as much dearer as a tree
        ((1.0, 4.0, 6.0), max, 7.0, 4.0, 5),  # nor is a wider tree as much as a narrower one
        ((0.5, 0.55, 0.6), add, 2.5, 3.5, 5),  # the cold steps are those of the best width
    ],
)
def test_what_the_host_does_beside_the_steps_is_learned(
    verify: tuple[float, float, float], taking: Callable[[float, float], float], hosts: float, tokens: float, best: int
) -> None:
    """The host's ``hosts`` milliseconds for each step of the scheduler come on top, or hide behind a longer step.

    The first forty steps take four times as long, as those of a cold server do: what they say of widths must not last.
    """
    numbers, clock, now = np.random.default_rng(4), served.Clock(), 0.0
    chooser = choice.Choice({"off": table(verify, draft=0.3)}, RUN)
    nodes = np.array([0.5, 0.25, 0.15, 0.1]) * tokens
    drafts = {width: nodes[: width - 1].sum() for width in LADDER}
    device = {width: ms + 0.3 for width, ms in zip(LADDER, verify, strict=True)} | {1: RUN * verify[0]}
    taken = {width: taking(ms, hosts) for width, ms in device.items()}
    rates = {width: (RUN if width == 1 else 1 + drafts[width]) / taken[width] for width in LADDER}
    assert max(rates, key=rates.__getitem__) == best
    gained = spent = 0.0
    for step in range(4000):
        if clock.end(now) or step % auto.EVERY == 0:
            chooser.correct(clock.medians())
        plan = chooser.plan(1, 10, "off")
        clock.begin(plan.kind, plan.measured_ms, now)
        now += taken[plan.width] / 1e3 * (4 if step < 40 else 1)
        accepted = int(numbers.poisson(drafts[plan.width]))
        if step > 400:
            gained += RUN if plan.width == 1 else 1 + accepted
            spent += taken[plan.width]
        if plan.width > 1:
            chooser.observe(plan, [accepted], np.concatenate(([1.0], nodes)))
    assert gained / spent > 0.96 * rates[best]


def test_costs_are_interpolated_once_for_a_batch_and_what_a_context_is_rounded_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contexts are rounded down to five binary digits."""
    asked, stock = [], CostTable.step_ms
    monkeypatch.setattr(CostTable, "step_ms", lambda table, *at: asked.append(at) or stock(table, *at))
    chooser = choice.Choice({"off": table((1.0, 1.0, 1.0)), "on": table((1.0, 1.0, 1.0))}, 1)
    for context in (1, 31, 32, 33, 992, 1000, 1023, 1024, 31):
        chooser.plan(2, context, "off")
    assert asked == [(2, 1), (2, 31), (2, 32), (2, 992), (2, 1024)]
    chooser.plan(3, 31, "off")
    chooser.plan(2, 31, "on")
    assert asked[5:] == [(3, 31), (2, 31)]


def test_the_histogram_counts_every_step() -> None:
    chooser = choice.Choice({"off": table((1.0, 1.0, 1.0))}, 1)
    for _ in range(3):
        drafted(chooser, [1, 1])
    assert chooser.report()["widths"] == {"1": 0, "3": 1, "5": 2}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(modes, "_current", modes.Switch(VerifyMode.OFF, (VerifyMode.OFF,)))
    return SimpleNamespace(device="cpu")


def batch(requests: int) -> SimpleNamespace:
    return SimpleNamespace(reqs=[SimpleNamespace(seqlen=7)] * requests)


def made(monkeypatch: pytest.MonkeyPatch, worker: Any) -> auto.Auto:
    monkeypatch.setattr(graphs, "capture", lambda *_: {})
    monkeypatch.setattr(graphs, "from_first_rank", lambda mine: mine)
    monkeypatch.setattr(auto, "costs_of", lambda *_: {"off": table((1.0, 1.0, 1.0))})
    found = auto.Auto(worker, LADDER, RUN)
    assert found.report() is None
    found.prepare(lambda *_: None)
    return found


def test_a_step_learns_from_its_own_draft(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    """Two steps under way, whose drafts and outcomes must not be mixed up."""
    found, seen = made(monkeypatch, worker), []
    monkeypatch.setattr(auto, "LOOK", 1)
    monkeypatch.setattr(found._choice, "observe", lambda *given: seen.append(given))
    first, second = (torch.full((2, 5), value) for value in (-1.0, -2.0))
    found.plan(batch(2))
    found.drafted(first)
    found.plan(batch(2))
    found.drafted(second)
    first.fill_(0.0)  # a graph's buffer: the next draft overwrites it
    found.verified([1, 0])
    monkeypatch.setattr(found._choice, "_pauses", {2: SimpleNamespace(drafts=lambda: False, gain=1.0, begun=0)})
    found.plan(batch(2))  # without a draft
    found.verified([0, 0])
    found.verified([0, 0])
    assert [drafts for _, drafts, _ in seen] == [[1, 0], [0, 0]]
    for (_, _, probabilities), value in zip(seen, (-1.0, -2.0), strict=True):
        np.testing.assert_allclose(probabilities, np.full(5, 2 * np.exp(value)), rtol=1e-6)
    assert found.report()["unmatched"] == 0  # type: ignore[index]


def test_scores_are_looked_at_now_and_then_and_what_was_accepted_always(
    monkeypatch: pytest.MonkeyPatch, worker: Any
) -> None:
    found, looked = made(monkeypatch, worker), []
    stock = found._choice.observe  # type: ignore[union-attr]
    monkeypatch.setattr(found._choice, "observe", lambda *given: (looked.append(given[2] is not None), stock(*given)))
    for _ in range(10):
        found.plan(batch(2))
        found.drafted(torch.full((2, 5), -1.0))
        found.verified([0, 0])
    assert looked == [step % auto.LOOK == 0 for step in range(10)]
    assert found.report()["gain"] < 1.5  # type: ignore[index, operator]


def test_the_ranks_exchange_what_steps_took(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    """Once in ``EVERY`` steps and when a kind was seen, all at the same step; each takes what the first rank saw."""
    found, told = made(monkeypatch, worker), {Kind("off", 2, 1): 7.0}
    own, calls, steps = iter(range(10**6)), [], []
    monkeypatch.setattr(auto, "perf_counter", lambda: next(own) * 1.0)
    monkeypatch.setattr(graphs, "from_first_rank", lambda mine: (calls.append((len(steps), mine)), told)[1])
    for _ in range(3 * auto.EVERY):
        steps.append(found.plan(batch(2)))
        found.verified([0, 0])
    assert len({plan.kind for plan in steps}) == 1
    seen = served.LEAST + 2
    assert [step for step, _ in calls] == [seen, auto.EVERY - 1, 2 * auto.EVERY - 1, 3 * auto.EVERY - 1]
    assert calls[0][1], "nothing was timed"
    assert found._choice._served is told


def test_a_prefill_interrupts_the_clock(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    found, calls = made(monkeypatch, worker), []
    monkeypatch.setattr(graphs, "from_first_rank", lambda mine: (calls.append(mine), mine)[1])
    for step in range(auto.EVERY):
        if step % 3 == 0:
            found.interrupt()
        found.plan(batch(2))
    assert calls == [{}]


def test_an_outcome_says_whether_it_was_a_run(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    found = made(monkeypatch, worker)
    found.plan(batch(2))
    found.drafted(torch.zeros(2, 5))
    assert not found.verified([1, 0])
    monkeypatch.setattr(found._choice, "_pauses", {2: SimpleNamespace(drafts=lambda: False)})
    assert found.plan(batch(2)).width == 1
    assert found.verified([3, 3])
    assert not found.verified([3, 3]), "no step was left"


def test_an_outcome_of_another_batch_teaches_nothing(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    found = made(monkeypatch, worker)
    monkeypatch.setattr(found._choice, "observe", lambda *_: pytest.fail("learned"))
    found.plan(batch(2))
    found.drafted(torch.zeros(2, 5))
    found.verified([1])
    found.verified([1, 1])
    assert found.report()["unmatched"] == 2  # type: ignore[index]
