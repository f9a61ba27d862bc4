"""A turn signal that is switched on and reaches no turn stops the run, in the first step that measures it."""

import pytest

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, credited, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.host.step.stops import check_turns_have_rewards
from verl_credit.turns.signals import StepRows, signals_of, step_rewards

BOTH = {"info_gain": 1.0, "tool_reward": 0.5}
GAINS = [[0.5, 0.1], [0.2], [0.3], [0.0, 0.2]]


def first_step(tool_rewards, names, gains=GAINS, **changes):
    """The stop after a step of four rows, two questions, in which the tools gave these rewards."""
    parts = ("call", "page")
    rows = [Row(parts * len(row) + ("done",), turn_rewards=tool_rewards[: len(row)]) for row in gains]
    tokenizer = make_tokenizer()
    turns = turn_batch(rows, tokenizer)
    step = credited(turns, gains, [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], **changes)
    given = StepRows(
        turns, tokenizer.decode, step.outcome_B, step.group_B, step.turn_reward_B_K, step.turn_mask_B_K
    )
    signals = signals_of(step.settings)
    *_, metrics = step_rewards(signals, step.settings, given, scored="info_gain" in names, tolerated_share=0)
    step.token_metrics |= metrics
    check_turns_have_rewards(step, set(names))


def test_one_of_several_that_never_arrives_is_named():
    first_step((0.5, None), BOTH, turn_signals=BOTH)
    said = "'tool_reward' gave no reward in the first step that measures it.* from info_gain alone"
    with pytest.raises(IntegrityError, match=said):
        first_step((None, None), BOTH, turn_signals=BOTH)


def test_a_signal_is_asked_after_once():
    first_step((None, None), {"info_gain"}, turn_signals=BOTH)


def test_none_at_all_and_a_clip_that_cannot_act():
    nothing = [[None, None], [None], [None], [None, None]]
    with pytest.raises(
        IntegrityError, match="none of the 4 trajectories .* a reward .info_gain.: the policy"
    ):
        first_step((), {"info_gain"}, gains=nothing)
    with pytest.raises(IntegrityError, match="every clip scale of the step is exactly 1"):
        first_step((), {"info_gain"}, gains=[[0.5, 0.5], [0.5], [0.5], [0.5, 0.5]])
    first_step((), {"info_gain"})


def test_the_steps_that_measure_a_signal():
    both = settings(turn_signals=BOTH, info_gain_warmup_steps=2, info_gain_every=3)
    assert [both.signals_at(step) for step in (1, 2, 3, 4)] == [
        {"tool_reward"},
        {"tool_reward"},
        {"info_gain", "tool_reward"},
        {"tool_reward"},
    ]
    assert settings(info_gain_norm_mode="none").signals_at(3) == set()
