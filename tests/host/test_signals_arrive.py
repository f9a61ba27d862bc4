"""A turn signal that reaches no turn stops the run: in the first step that measures it, and later after some in a row."""

import pytest

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, credited, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.turns.step.signals.built_in import signals_of
from verl_credit.turns.step.step_checks import UnrewardedSteps, check_turns_have_rewards

BOTH = {"info_gain": 1.0, "tool_reward": 0.5}
GAINS = [[0.5, 0.1], [0.2], [0.3], [0.0, 0.2]]


def step_of(tool_rewards, names, gains=GAINS, **changes):
    """A step of four rows, two questions, in which the tools gave these rewards."""
    parts = ("call", "page")
    rows = [Row(parts * len(row) + ("done",), turn_rewards=tool_rewards[: len(row)]) for row in gains]
    turns = turn_batch(rows, make_tokenizer())
    given = {"signals": signals_of(settings(**changes)), "scored": "info_gain" in names}
    return credited(turns, gains, [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], **given, **changes)


def first_step(tool_rewards, names, gains=GAINS, **changes):
    """The stop after it."""
    check_turns_have_rewards(step_of(tool_rewards, names, gains, **changes), set(names))


def test_one_of_several_that_never_arrives_is_named():
    first_step((0.5, None), BOTH, turn_signals=BOTH)
    said = "'tool_reward' .*first step.* info_gain alone"
    with pytest.raises(IntegrityError, match=said):
        first_step((None, None), BOTH, turn_signals=BOTH)


def test_none_at_all_and_a_clip_that_cannot_act():
    nothing = [[None, None], [None], [None], [None, None]]
    with pytest.raises(IntegrityError, match="none of the 4 trajectories .*info_gain"):
        first_step((), {"info_gain"}, gains=nothing)
    with pytest.raises(IntegrityError, match="clip scale .* exactly 1"):
        first_step((), {"info_gain"}, gains=[[0.5, 0.5], [0.5], [0.5], [0.5, 0.5]])
    first_step((), {"info_gain"})


def followed(kinds, tolerated=2, names=("tool_reward",), **changes):
    """(notes, steps before the stop, what it says) of steps with rewards (r), none (-), no gain (n), or no tool turn (0)."""
    notes, done, said = [], [], ""
    unrewarded = UnrewardedSteps(tolerated, notes.append)
    nothing = [[None] * len(row) for row in GAINS]
    given = {
        "r": ((0.5, 0.25), GAINS),
        "-": ((None, None), GAINS),
        "n": ((0.5, 0.25), nothing),
        "0": ((), [[]] * 4),
    }
    try:
        for number, kind in enumerate(kinds, 1):
            earned, gains = given[kind]
            chosen = {"turn_signals": dict.fromkeys(names, 1.0), "dynamic_clip": False}
            step = step_of(earned, names, gains, **chosen, **changes)
            unrewarded.see(step, number)
            done.append(kind)
    except IntegrityError as error:
        said = str(error)
    return notes, "".join(done), said


@pytest.mark.slow
def test_a_signal_that_dries_up_is_noted_and_stops_the_run_after_steps_in_a_row():
    notes, done, said = followed("r--r---r")
    assert done == "r--r--" and said.startswith(
        "turn signal 'tool_reward' gave no turn a reward in 3 steps in a row, although tools were called (steps 5, 6, 7)"
    )
    after = "gave none of the 6 tool turns a reward; 3 such steps in a row stop the run (faults.max_unrewarded_steps)"
    assert notes == [f"warning: in step {step} turn signal 'tool_reward' {after}" for step in (2, 5)]
    assert followed("r-", tolerated=0)[1] == "r"
    notes, done, said = followed("r------", tolerated=None)
    assert done == "r------" and not said and len(notes) == 1 and notes[0].endswith("tool turns a reward")


@pytest.mark.slow
def test_steps_without_a_tool_turn_are_noted_and_neither_count_nor_end_a_row():
    notes, done, said = followed("r00000")
    assert done == "r00000" and not said
    assert notes == ["warning: in step 2 turn signal 'tool_reward' gave no reward: no tool was called"]
    notes, done, said = followed("r0---")
    assert (
        done == "r0--" and len(notes) == 2 and "step 3 turn signal" in notes[1] and "stop the run" in notes[1]
    )
    notes, done, said = followed("r-00-0-")
    assert done == "r-00-0" and "(steps 2, 5, 7)" in said and len(notes) == 1


def test_only_steps_that_measure_a_signal_are_asked():
    """Gains of every second step: between two of them there is nothing to miss."""
    notes = []
    unrewarded = UnrewardedSteps(2, notes.append)
    for number in (1, 2, 3):
        step = step_of(
            (0.5, 0.1), BOTH if number % 2 else ["tool_reward"], turn_signals=BOTH, info_gain_every=2
        )
        unrewarded.see(step, number)
    assert notes == []


def test_the_steps_that_measure_a_signal():
    both = settings(turn_signals=BOTH, info_gain_warmup_steps=2, info_gain_every=3)
    assert [both.signals_at(step) for step in (1, 2, 3, 4)] == [
        {"tool_reward"},
        {"tool_reward"},
        {"info_gain", "tool_reward"},
        {"tool_reward"},
    ]
    assert settings(info_gain_norm_mode="none").signals_at(3) == set()
