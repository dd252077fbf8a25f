"""``budget="auto"``: the same tokens as ever, widths by cost, pauses where drafting does not pay."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.test_engine_tokens import GREEDY, LAWS, prompts
from tests.toy.models import NoisyDrafter, ToyDrafter, ToyTarget, expected

from treeverify.costs import CostTable
from treeverify.engine.budget import AutoBudget
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import SamplingParams
from treeverify.errors import ConfigError
from treeverify.tree.budget import LONGEST_PAUSE, SHORTEST_PAUSE

LADDER = (1, 2, 3, 5, 9, 17)


def costs(per_node: float, draft: float = 0.5) -> CostTable:
    verify = np.array(LADDER, dtype=np.float64).reshape(-1, 1, 1) * per_node + 1.0
    return CostTable(LADDER, (1,), (1,), verify, np.full((1, 1), draft))


def engine(policy, drafter=None, **config) -> Engine:
    settings = {"slots": 2000, "verify": "off"} | config
    return Engine(ToyTarget(), drafter or ToyDrafter(), config=EngineConfig(**settings), policy=policy)


def run(machine: Engine, count: int = 4) -> None:
    for prompt in prompts(count):
        assert machine.generate(prompt, GREEDY, budget="auto").tokens == expected(prompt, GREEDY)
        assert machine.audit().available == machine.config.slots


@pytest.mark.parametrize("per_node", [0.0, 0.05, 0.3, 100.0])
@pytest.mark.parametrize("params", LAWS, ids=lambda params: str(params.temperature))
def test_auto_gives_the_tokens_of_any_fixed_budget(per_node, params):
    machine = engine(AutoBudget(costs(per_node)))
    for prompt in prompts(3):
        fixed = machine.generate(prompt, params, budget=16)
        found = machine.generate(prompt, params, budget="auto")
        assert found.tokens == fixed.tokens == expected(prompt, params)
        assert sum(found.acceptance_lengths) == len(found.tokens) - 1


def test_a_mixed_batch_of_auto_and_fixed_that_runs_out_of_slots():
    machine = engine(AutoBudget(costs(0.1)), slots=160, max_batch=6, prefill_chunk=16)
    texts = prompts(10, seed=3)
    budgets = ["auto", 16, "auto", 4, "auto"] * 2
    ids = [machine.submit(text, GREEDY, budget=budget) for text, budget in zip(texts, budgets, strict=True)]
    while machine.busy:
        machine.step()
        machine.audit()
    assert machine.metrics.retractions > 0
    for text, request in zip(texts, ids, strict=True):
        assert machine.result(request).tokens == expected(text, GREEDY)


def test_free_nodes_are_all_used_and_dear_ones_are_not():
    free, medium, dear = (engine(AutoBudget(costs(per_node))) for per_node in (0.0, 0.1, 100.0))
    for machine in (free, medium, dear):
        run(machine)
    mean = [m.metrics.nodes / m.metrics.request_steps for m in (free, medium, dear)]
    assert mean[0] > 12 > mean[1] > 2 > 1.1 > mean[2]
    assert set(free.metrics.widths) | set(medium.metrics.widths) <= set(range(1, 18))
    assert len(medium.metrics.widths) > 2, "the width follows the draft of each step"


class CountingDrafter(NoisyDrafter):
    drafts = 0

    def draft(self, *arguments):
        self.drafts += 1
        return super().draft(*arguments)


def test_a_useless_drafter_is_soon_asked_less_and_less():
    drafter = CountingDrafter()
    machine = engine(AutoBudget(costs(0.2, draft=1.0)), drafter)
    run(machine, 12)
    steps = machine.metrics.request_steps
    assert steps > 300
    assert drafter.drafts < 30, f"{drafter.drafts} of {steps} steps drafted"


def test_pauses_double_and_end_when_drafting_pays_again():
    policy = AutoBudget(costs(0.0, draft=3.0))
    row = np.log(np.array([1, 0.9], dtype=np.float32))
    pauses = []
    for _ in range(40):
        waited = 0
        while not policy.drafts(1, 10):
            waited += 1
        pauses.append(waited)
        policy.choose([row], 10)
        policy.accepted([0])
    found = [pause for pause in pauses if pause]
    assert found[:5] == [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE, 4 * SHORTEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    for _ in range(100):
        while not policy.drafts(1, 10):
            pass
        policy.choose([row], 10)
        policy.accepted([7])
    assert policy.gain > 1
    assert all(policy.drafts(1, 10) for _ in range(200))


def test_a_batch_shares_one_width_and_ends_are_respected():
    machine = engine(AutoBudget(costs(0.05)), max_batch=5)
    params = [SamplingParams(max_new_tokens=new, seed=1) for new in (1, 2, 3, 17, 40)]
    texts = prompts(5, seed=8)
    ids = [machine.submit(text, each, budget="auto") for text, each in zip(texts, params, strict=True)]
    while machine.busy:
        machine.step()
    for text, request, each in zip(texts, ids, params, strict=True):
        assert machine.result(request).tokens == expected(text, each)


def test_auto_is_refused_without_costs_and_for_other_drafts():
    with pytest.raises(ConfigError, match="budget: auto needs measured costs"):
        engine(None).submit([3], budget="auto")
    for draft in ("chain", "none"):
        with pytest.raises(ConfigError, match="budget: auto needs draft tree"):
            engine(AutoBudget(costs(1.0))).submit([3], draft=draft, budget="auto")
    with pytest.raises(ConfigError, match="budget: expected an integer"):
        engine(AutoBudget(costs(1.0))).submit([3], budget="Auto")
