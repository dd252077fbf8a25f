"""Gates on made-up samples and counters: each closes for its fault, names the place, and stays open without one."""

from __future__ import annotations

import re

import pytest
from tests.cutover.synthetic import layer, sample, shape, state

from treeverify.cutover import gates
from treeverify.cutover.limits import Limits
from treeverify.cutover.samples import Window
from treeverify.cutover.verdict import Verdict
from treeverify.errors import ConfigError

LIMITS = Limits()
BASE = sample()


def judged(
    stage="validate", candidate=BASE, before=None, after=None, limits=LIMITS, baseline=BASE
) -> dict[str, Verdict]:
    mode = "on" if stage == "on" else "validate"
    shapes = [shape(4, "off", "validate", "on")]
    before = before or state(mode, calls={mode: 5}, shapes=shapes)
    after = after or state(mode, rows=20_000, calls={mode: 50}, shapes=shapes)
    found = gates.judge(stage, baseline, candidate, [before], [after], limits)
    return {verdict.gate: verdict for verdict in found}


def closed(verdicts: dict[str, Verdict]) -> set[str]:
    return {gate for gate, verdict in verdicts.items() if not verdict.passed}


@pytest.mark.parametrize("stage", ["validate", "soak", "on"])
def test_a_healthy_stage_is_open_and_judges_what_it_should(stage):
    verdicts = judged(stage)
    assert closed(verdicts) == set()
    expected = {"mode", "errors", "shapes", "generation"}
    expected |= {"parity"} if stage != "on" else {"acceptance", "logprob", "top-1", "top-k", "kl", "speed"}
    assert set(verdicts) == expected
    assert all(verdict.reason and verdict.threshold and "\n" not in verdict.reason for verdict in verdicts.values())


def test_a_soak_needs_no_samples_and_the_others_do():
    assert closed(judged("soak", candidate=None, baseline=None)) == set()
    for stage in ("validate", "on"):
        with pytest.raises(ConfigError, match="a baseline and a candidate"):
            judged(stage, candidate=None)


def test_samples_of_two_plans_are_refused():
    with pytest.raises(ConfigError, match="two plans"):
        judged(candidate=sample(prompts=15))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([layer(0, 20_000), layer(1, 20_000, mismatched_rows=2)], "rank 0 layer 1: NaN or infinity .* 2 rows .*head 3"),
        ([layer(0, 20_000, max_row_ulp=2.01)], "rank 0 layer 0: a row is 2.01 bfloat16 ULP off"),
        ([layer(0, 20_000, beyond=21)], "0.10% of rows are beyond 1 ULP"),  # 0.105 %
        ([layer(0, 9_999)], "only 9999 rows"),
        ([], "compared nothing"),
    ],
)
def test_parity_closes_and_names_the_place(layers, words):
    after = state(calls={"validate": 50}, layers=layers)
    verdicts = judged(after=after)
    assert closed(verdicts) == {"parity"}
    assert re.search(words, verdicts["parity"].reason), verdicts["parity"].reason


def test_parity_at_its_thresholds_is_open():
    layers = [layer(0, 10_000, beyond=10, max_row_ulp=2.0)]
    assert closed(judged(after=state(calls={"validate": 50}, layers=layers))) == set()


@pytest.mark.parametrize("heads", [1, 8, 128])
def test_two_ulp_on_one_head_of_one_layer_of_sixty_close_parity(heads):
    """A rank has at most 128 heads; among all rows of the model the fault is 1 in 60 * heads, below the share."""
    rows = 128 * 100
    wrong = rows // heads
    layers = [layer(n, rows) for n in range(60)]
    layers[37] = layer(37, rows, beyond=wrong, max_row_ulp=2.0, worst_head=heads - 1)
    verdict = judged(after=state(calls={"validate": 50}, layers=layers))["parity"]
    assert not verdict.passed
    assert f"layer 37: {100 / heads:.2f}% of rows are beyond 1 ULP (worst: node 2, head {heads - 1})" in verdict.reason


def test_parity_takes_off_what_was_counted_before_unless_the_process_is_another():
    early = state(calls={"validate": 5}, layers=[layer(0, 15_000)])
    late = state(calls={"validate": 50}, layers=[layer(0, 20_000)])
    assert closed(judged(before=early, after=late)) == {"parity"}
    assert closed(judged("soak", before=early, after=late)) == set()
    other = state(calls={"validate": 5}, layers=[layer(0, 15_000)], pid=12)
    assert closed(judged(before=other, after=late)) == {"errors"}  # a restart, but enough rows


def test_a_limit_that_is_no_edge_is_refused():
    with pytest.raises(ConfigError, match="an edge of the histogram"):
        judged(limits=Limits(usual_ulp=1.5))


def test_mode_closes_for_a_rank_in_another_mode_and_for_one_that_served_nothing():
    wrong = state("off", rows=20_000, calls={"validate": 50})
    assert "rank 0 is off" in judged(after=wrong)["mode"].reason
    idle = state(rows=20_000, calls={"validate": 5})
    assert "served no verify pass" in judged(after=idle)["mode"].reason
    assert judged("soak", after=idle)["mode"].passed


@pytest.mark.parametrize(
    ("change", "words"),
    [({"pid": 12}, "restarted"), ({"switches": 2}, "switched by somebody else"), ({"rank": 1}, "gone")],
)
def test_errors_close_for_what_happened_to_the_server(change, words):
    verdict = judged(after=state(rows=20_000, calls={"validate": 50}, **change))["errors"]
    assert not verdict.passed
    assert words in verdict.reason


def test_errors_close_for_failed_requests_of_either_sample():
    failed = BASE.model_copy(update={"failures": ["speed pass 0, p1: HTTP 500: NaN"]})
    assert "candidate: 1 requests failed, first: speed pass 0, p1" in judged(candidate=failed)["errors"].reason
    assert not judged(baseline=failed)["errors"].passed


@pytest.mark.parametrize(
    ("served", "open_"),
    [
        (shape(4, "on"), True),
        (shape(1, "on"), True),
        (shape(5, "on"), False),  # more requests than were compared
        (shape(4, "on", nodes=16), False),
    ],
)
def test_shapes_that_ours_serves_must_have_been_compared(served, open_):
    after = state("on", rows=1, calls={"on": 50}, shapes=[shape(4, "validate"), served])
    verdict = judged("on", after=after)["shapes"]
    assert verdict.passed is open_
    assert open_ or "not compared" in verdict.reason


def test_no_compared_shape_closes_shapes():
    after = state(rows=20_000, calls={"validate": 50}, shapes=[shape(4, "off")])
    assert closed(judged(after=after)) == {"shapes"}


def parted(place: int, gap: float, listed: bool = True, ahead: float = 0.0):
    """The sample, its first text parting at ``place`` where the other token was ``gap`` behind, then ``ahead``."""
    first = BASE.generations[0]
    mine = first.positions[place]
    other = mine.top[1][0] if listed else 10_000
    base_position = mine.model_copy(update={"top": [mine.top[0], (mine.top[1][0], mine.logprob - gap), *mine.top[2:]]})
    its = base_position.model_copy(
        update={"token": other, "top": [(other, mine.logprob), (mine.token, mine.logprob - ahead)]}
    )

    def put(found):
        rows = [*first.positions]
        rows[place] = found
        return BASE.model_copy(
            update={"generations": [first.model_copy(update={"positions": rows}), *BASE.generations[1:]]}
        )

    return put(base_position), put(its)


@pytest.mark.parametrize(("gap", "open_"), [(0.2, True), (0.25, True), (0.26, False), (3.0, False)])
def test_texts_may_part_at_a_near_tie_only(gap, open_):
    baseline, candidate = parted(3, gap)
    verdict = judged(baseline=baseline, candidate=candidate)["generation"]
    assert verdict.passed is open_
    assert (verdict.figures["first_difference"], verdict.figures["near_ties"]) == (3, int(open_))
    assert verdict.figures["largest_gap"] == pytest.approx(gap)


def parted_all():
    """Two samples: p0 parts at a near-tie, p1 beyond one, p2 in prefill, p3 is missing; the others are the same."""
    pairs = [parted(3, 0.1), parted(5, 0.7), parted(0, 0.4)]
    texts = [[pair[side].generations[0] for pair in pairs] for side in (0, 1)]
    sides = []
    for side, count in ((0, 4), (1, 3)):
        named = [text.model_copy(update={"prompt": f"p{i}"}) for i, text in enumerate(texts[side])]
        rest = BASE.generations[3:4] if count == 4 else []
        sides.append(BASE.model_copy(update={"generations": [*named, *rest, *BASE.generations[4:]]}))
    return sides


def test_each_text_that_parts_has_its_own_place_and_gap():
    baseline, candidate = parted_all()
    verdict = judged(baseline=baseline, candidate=candidate)["generation"]
    listed = [(text.prompt, text.place, text.gap and round(text.gap, 6), text.judged) for text in verdict.texts]
    assert listed == [
        ("p0", 3, 0.1, "near-tie"),
        ("p1", 5, 0.7, "fault"),
        ("p2", 0, 0.4, "prefill"),
        ("p3", None, None, "fault"),
    ]
    figures = verdict.figures
    assert (figures["same"], figures["near_ties"], figures["faults"], figures["differ_in_prefill"]) == (12, 1, 2, 1)
    assert (figures["first_difference"], figures["largest_gap"]) == (3, pytest.approx(0.7))
    blind = judged(baseline=without_logprobs(baseline), candidate=without_logprobs(candidate))["generation"]
    assert [(text.prompt, text.place, text.gap, text.judged) for text in blind.texts] == [
        ("p0", 3, None, "not judged"),
        ("p1", 5, None, "not judged"),
        ("p2", 0, None, "prefill"),
        ("p3", None, None, "fault"),
    ]


def test_texts_that_are_the_same_are_not_listed():
    assert judged()["generation"].texts == ()


def test_the_gap_of_both_modes_counts():
    baseline, candidate = parted(3, 0.2, ahead=0.2)
    verdict = judged(baseline=baseline, candidate=candidate)["generation"]
    assert not verdict.passed
    assert verdict.figures["largest_gap"] == pytest.approx(0.4)


def test_a_token_that_the_baseline_does_not_list_is_a_fault():
    baseline, candidate = parted(3, 0.1, listed=False)
    verdict = judged(baseline=baseline, candidate=candidate)["generation"]
    assert not verdict.passed
    assert "p0: token 3" in verdict.reason


def test_a_text_that_differs_in_prefill_is_not_ours_but_one_that_is_missing_is():
    baseline, candidate = parted(0, 3.0)
    assert judged(baseline=baseline, candidate=candidate)["generation"].figures["differ_in_prefill"] == 1
    missing = BASE.model_copy(update={"generations": BASE.generations[1:]})
    assert "p0: no candidate text" in judged(candidate=missing)["generation"].reason


def test_speed_closes_where_the_whole_interval_is_below_the_threshold():
    def timed(seconds: float, spread: float):
        windows = [Window(prompt=f"p{i}", run=0, tokens=8, seconds=seconds * (1 + spread * (i % 2))) for i in range(16)]
        return BASE.model_copy(update={"speed": windows})

    assert judged("on", candidate=timed(0.5, 0.1))["speed"].figures["ratio"] == pytest.approx(2 / 1.1**0.5)
    slow = judged("on", candidate=timed(1.2, 0.05))["speed"]
    assert not slow.passed
    assert slow.figures["high"] < 0.9
    assert judged("on", candidate=timed(1.0, 1.0))["speed"].passed  # too noisy to say
    recorded = judged("on", candidate=timed(5.0, 0.0), limits=Limits(speed_ratio=None))["speed"]
    assert recorded.passed is None
    assert recorded.figures["ratio"] == pytest.approx(0.2, rel=0.05)
    untimed = BASE.model_copy(update={"speed": []})
    assert judged("on", candidate=untimed)["speed"].passed is False
    assert judged("on", candidate=untimed, limits=Limits(speed_ratio=None))["speed"].passed is None


def test_too_little_is_not_let_through():
    few = sample(prompts=11)
    verdicts = judged("on", baseline=few, candidate=few)
    assert "11 prompts" in verdicts["statistics"].reason
    assert closed(verdicts) == {"statistics"}
    untold = BASE.model_copy(
        update={"generations": [found.model_copy(update={"accepted": None}) for found in BASE.generations]}
    )
    assert "acceptance lengths" in judged("on", candidate=untold)["statistics"].reason


def without_logprobs(found=BASE):
    """The sample as it is where none were asked for."""
    texts = [text.model_copy(update={"positions": [], "ids": text.tokens}) for text in found.generations]
    plan = found.plan.model_copy(update={"logprobs": False})
    return found.model_copy(update={"plan": plan, "generations": texts, "probes": []})


def outcomes(verdicts):
    return {gate: verdict.passed for gate, verdict in verdicts.items()}


def test_without_log_probabilities_what_needs_them_is_not_judged_and_the_rest_is():
    blind = without_logprobs()
    found = outcomes(judged("on", baseline=blind, candidate=blind))
    assert {gate for gate, passed in found.items() if passed is None} == {"logprob", "top-1", "top-k", "kl"}
    assert {gate for gate, passed in found.items() if passed} == {
        *("mode", "errors", "shapes", "generation", "acceptance", "speed")
    }
    worse = without_logprobs(sample(accepted=[5, 3, 2]))
    assert outcomes(judged("on", baseline=blind, candidate=worse))["acceptance"] is False
    few = without_logprobs(sample(prompts=11))
    assert closed(judged("on", baseline=few, candidate=few)) == {"statistics"}


@pytest.mark.parametrize("gap", [0.2, 3.0])
def test_without_log_probabilities_texts_that_part_are_neither_near_ties_nor_faults(gap):
    baseline, candidate = map(without_logprobs, parted(3, gap))
    verdict = judged(baseline=baseline, candidate=candidate)["generation"]
    assert verdict.passed is None
    assert (verdict.figures["near_ties"], verdict.figures["faults"], verdict.figures["not_judged"]) == (0, 0, 1)
    assert verdict.figures["first_difference"] == 3
    assert "p0 at token 3" in verdict.reason
    missing = candidate.model_copy(update={"generations": candidate.generations[:-1]})
    assert judged(baseline=baseline, candidate=missing)["generation"].passed is False


def test_passes_of_a_process_that_is_gone_are_not_taken_off_a_new_ones():
    gone, new = state(calls={"validate": 60}), state(rows=20_000, calls={"validate": 50}, pid=12)
    verdict = judged(before=gone, after=new)["mode"]
    assert (verdict.passed, verdict.figures["fewest_passes"]) == (True, 50)
