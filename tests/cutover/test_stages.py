"""The state machine: every table, walked by hypothesis and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeverify.cutover.stages import ENDED, RESTARTS, Event, Stage, path, served, step, transitions
from treeverify.env import VerifyMode
from treeverify.errors import ContractError

PATHS = [path(mode) for mode in VerifyMode] + [path(VerifyMode.ON, eager=True)]
any_path = st.sampled_from(PATHS)


def test_paths_are_these():
    assert [[stage.value for stage in stages] for stages in PATHS] == [
        ["off", "unit"],
        ["off", "validate", "soak", "unit"],
        ["off", "validate", "soak", "on", "unit"],
        ["off", "validate", "soak", "validate-eager", "on-eager", "validate-graphs", "on", "unit"],
    ]
    with pytest.raises(ContractError, match="eager"):
        path(VerifyMode.VALIDATE, eager=True)


@given(any_path)
def test_passing_every_stage_ends_in_done(stages):
    stage = stages[0]
    for expected in (*stages[1:], Stage.DONE):
        stage = step(stages, stage, Event.PASSED)
        assert stage is expected


@given(any_path, st.data())
def test_no_stage_is_skipped_and_on_is_reached_through_validate_and_soak_only(stages, data):
    """Random walks: wherever a walk is, the stages of work it passed are a prefix of the path."""
    table, stage, passed = transitions(stages), stages[0], []
    for _ in range(12):
        moves = sorted((event, to) for (at, event), to in table.items() if at is stage)
        if not moves:
            break
        event, to = data.draw(st.sampled_from(moves))
        if event is Event.PASSED:
            passed.append(stage)
        assert tuple(passed) == stages[: len(passed)]
        stage = to
    if stage is Stage.DONE:
        assert tuple(passed) == stages


@given(any_path)
def test_a_stage_that_begins_with_a_new_process_serves_validate(stages):
    """So that no process serves on without having been validated itself."""
    for stage in RESTARTS & {*stages}:
        assert served(stage, VerifyMode.ON) is VerifyMode.VALIDATE
    assert set(PATHS[3]) >= RESTARTS
    assert not [stage for stages in PATHS[:3] for stage in stages if stage in RESTARTS]


@given(any_path)
def test_every_stage_of_work_can_be_stopped_and_only_a_proved_rollback_is_rolled_back(stages):
    table = transitions(stages)
    for stage in stages:
        assert table[stage, Event.STOPPED] is Stage.ROLLBACK
        assert table[stage, Event.ASKED] is Stage.ROLLBACK
    assert {at for (at, _), to in table.items() if to is Stage.ROLLED_BACK} == {Stage.ROLLBACK}
    assert [event for (_, event), to in table.items() if to is Stage.ROLLED_BACK] == [Event.RESTORED]
    assert not [at for at, _ in table if at is Stage.ROLLED_BACK]


@given(any_path)
def test_from_everywhere_an_end_can_be_reached(stages):
    table = transitions(stages)
    reached = set(ENDED)
    while more := {at for (at, _), to in table.items() if to in reached} - reached:
        reached |= more
    assert reached >= {at for at, _ in table}


@given(any_path, st.sampled_from(Stage), st.sampled_from(Event))
def test_other_moves_are_refused(stages, stage, event):
    if (stage, event) not in transitions(stages):
        with pytest.raises(ContractError, match="event"):
            step(stages, stage, event)


def test_a_stage_names_the_mode_that_it_serves():
    for mode in VerifyMode:
        assert served(Stage.UNIT, mode) is served(Stage.DONE, mode) is mode
    assert [served(stage, VerifyMode.ON).value for stage in PATHS[3]] == [
        "off",
        "validate",
        "validate",
        "validate",
        "on",
        "validate",
        "on",
        "on",
    ]
