"""Engine and pool as a state machine: random submit, step, abort under memory pressure; nothing lost, nothing wrong."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.toy.models import VOCAB, ToyDrafter, ToyTarget, expected

from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import FinishReason, SamplingParams
from treeverify.errors import CapacityError

PROMPTS = st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=12)
DRAFTS = st.sampled_from([("none", None), ("chain", None), ("chain", 2), ("tree", 0), ("tree", 5), ("tree", 12)])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    max_new_tokens=st.integers(1, 18),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(20, 70), batch=st.integers(1, 4), chunk=st.sampled_from([1, 5, 64]))
    def start(self, slots, batch, chunk):
        config = EngineConfig(slots=slots, max_batch=batch, prefill_chunk=chunk, verify="off")
        self.engine = Engine(ToyTarget(), ToyDrafter(), config=config)
        self.slots = slots
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.told: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.aborted_inside: set[int] = set()  # a step
        self.to_abort: set[int] = set()  # by the next callback inside a step
        self.engine.metrics.observer = self.inside_a_step

    def inside_a_step(self, *_):
        for request in self.to_abort:
            if self.engine.abort(request):
                self.aborted.add(request)
                self.aborted_inside.add(request)
        self.to_abort = set()

    @rule(prompt=PROMPTS, params=PARAMS, draft=DRAFTS)
    def submit(self, prompt, params, draft):
        try:
            request = self.engine.submit(prompt, params, draft=draft[0], budget=draft[1])
        except CapacityError:
            assert len(prompt) + params.max_new_tokens - 1 > self.slots  # not even without a draft
            return
        self.asked[request], self.told[request] = (prompt, params), []

    @rule()
    def step(self):
        for output in self.engine.step():
            self.told[output.request_id] += output.tokens

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(sorted(self.asked)))
        if self.engine.abort(request):
            self.aborted.add(request)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort_inside_a_step(self, data):
        self.to_abort.add(data.draw(st.sampled_from(sorted(self.asked))))

    @invariant()
    def the_pool_is_whole(self):
        if hasattr(self, "engine"):
            self.engine.audit()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.busy:
            self.step()
        assert self.engine.audit().held == {}
        for request, (prompt, params) in self.asked.items():
            result = self.engine.result(request)
            want = expected(prompt, params)
            assert result.tokens == self.told[request]
            gone = result.finish is FinishReason.ABORT
            assert gone or request not in self.aborted - self.aborted_inside  # its step may have been its last
            assert request in self.aborted or not gone
            assert result.tokens == (want[: len(result.tokens)] if gone else want)


TestEngineStates = EngineMachine.TestCase
TestEngineStates.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
