"""A pool that is short of slots: a budget is a limit, so whatever plain decoding finishes is finished."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.toy.models import ToyDrafter, ToyTarget, expected

from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import SamplingParams
from treeverify.errors import CapacityError

PROMPT = [3] * 20
THIRTEEN = SamplingParams(max_new_tokens=13, stop_token_ids=())
PLAIN = 20 + 13 - 1
"""Slots of plain decoding: neither of the last two tokens but one root."""


def engine(slots: int, **options) -> Engine:
    policy = options.pop("policy", None)
    config = EngineConfig(slots=slots, verify="off", **options)
    return Engine(ToyTarget(), ToyDrafter(skill=1.0), config=config, policy=policy)


def widths(machine: Engine) -> Counter[int]:
    """Nodes of each verify call of one request, from the target's own forwards."""
    return Counter(machine.target.forwards[1:])


class Widest:
    """Chooses the most nodes that there are."""

    widest = 9

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.asked = 0

    def drafts(self, batch: int, context: int) -> bool:
        self.asked += 1
        return True

    def choose(self, scores, context: int) -> int:
        self.sizes.append(max(map(len, scores)))
        return self.widest

    def accepted(self, drafts) -> None: ...


@pytest.mark.parametrize("draft", [("tree", 8), ("tree", 64), ("tree", 256), ("chain", None), ("tree", "auto")])
@pytest.mark.parametrize("slots", [PLAIN, PLAIN + 1, PLAIN + 3, PLAIN + 7, PLAIN + 8])
def test_a_budget_is_a_limit_and_not_a_demand(draft, slots):
    machine = engine(slots, policy=Widest())
    result = machine.generate(PROMPT, THIRTEEN, draft=draft[0], budget=draft[1])
    assert result.tokens == expected(PROMPT, THIRTEEN)
    assert result.retractions == 0
    assert max(widths(machine)) > 1, "nothing was drafted while there was room"
    assert machine.audit().available == slots


def test_trees_shrink_with_the_room_that_is_left():
    """The drafter knows the text, so that each step takes all it may: 12 tokens after prefill's, 4 nodes to spare."""
    machine = engine(PLAIN + 3)
    assert machine.generate(PROMPT, THIRTEEN, draft="chain").tokens == expected(PROMPT, THIRTEEN)
    roomy = engine(200)
    roomy.generate(PROMPT, THIRTEEN, draft="chain")
    assert max(widths(machine)) == max(widths(roomy)) == 6  # the drafter's depth of 5, and the root
    tight = engine(PLAIN)
    params = SamplingParams(max_new_tokens=4, stop_token_ids=())
    assert engine(23).generate(PROMPT, params, budget=8).tokens == expected(PROMPT, params)
    tight.generate(PROMPT + expected(PROMPT, THIRTEEN)[:9], params, budget=64)
    assert max(widths(tight)) == 3  # 29 + 4 tokens in 32 slots: 3 for the first step's nodes


@pytest.mark.parametrize("slots", [PLAIN - 1, 20])
def test_what_plain_decoding_cannot_finish_is_refused_with_any_draft(slots):
    machine = engine(slots)
    for draft, budget in (("none", None), ("chain", None), ("tree", 0), ("tree", 8)):
        with pytest.raises(
            CapacityError, match=f"needs up to {PLAIN} slots .* without drafts, but the pool has {slots}"
        ):
            machine.submit(PROMPT, THIRTEEN, draft=draft, budget=budget)


@pytest.mark.parametrize("count", [2, 3])
def test_drafts_give_way_before_a_request_does(count):
    """As many slots as all need without drafts: nobody is retracted, and some steps draft all the same."""
    texts = [[3 + i] * 8 for i in range(count)]
    machine = engine(count * (8 + 13 - 1) + 9)
    ids = [machine.submit(text, THIRTEEN, budget=8) for text in texts]
    while machine.busy:
        machine.step()
        machine.audit()
    assert [machine.result(i).tokens for i in ids] == [expected(text, THIRTEEN) for text in texts]
    assert machine.metrics.retractions == 0
    assert machine.metrics.nodes > machine.metrics.request_steps


def test_an_older_requests_draft_gives_way_to_a_younger_ones_root():
    machine = engine(40)
    old, young = machine.submit([3] * 4, THIRTEEN, budget=8), machine.submit([5] * 11, THIRTEEN, budget=8)
    widths_of: dict[int, list[int]] = {old: [], young: []}
    machine.metrics.observer = lambda request, tree, path: widths_of[request].append(tree.width)
    results = [machine.finish(old), machine.finish(young)]
    assert [result.tokens for result in results] == [expected([3] * 4, THIRTEEN), expected([5] * 11, THIRTEEN)]
    assert machine.metrics.retractions == 0
    assert max(widths_of[old]) > 1


def test_where_slots_leave_no_draft_none_is_asked_for():
    """A step that could not draft anyway says nothing about drafting: the policy must not count it as a try."""
    policy = Widest()
    machine = engine(30, policy=policy)
    ids = [machine.submit([3 + i] * 2, THIRTEEN, budget="auto") for i in range(2)]
    assert [len(machine.finish(request).tokens) for request in ids] == [13, 13]
    assert machine.metrics.retractions == 0
    assert machine.metrics.widths[1] > 0
    assert policy.asked == len(policy.sizes) > 0
    assert min(policy.sizes) > 1
