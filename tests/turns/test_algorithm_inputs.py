"""What a step brings to an algorithm of the user's, beside rewards."""

from dataclasses import replace

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, lost_row, turn_batch
from verl_credit.turns.gains import plan_gains
from verl_credit.turns.step_tables import turn_step


def own(context):
    return [[0.0] * len(values) for values in context.logprobs_G]


def test_states_and_texts_of_every_turn():
    tokenizer = make_tokenizer()
    rows = [
        Row(("ask", "page", "again", "page two", "done")),
        Row(("seek", "page", "done")),
        lost_row("connect"),
    ]
    chosen = settings(info_gain_norm_mode="none", algorithm_mode=f"{__name__}.own")
    turns = turn_batch(rows, tokenizer)
    plan = plan_gains(turns, chosen, tokenizer, scored=False)
    step = turn_step(
        plan,
        None,
        chosen,
        tokenizer,
        {},
        signals={},
        step=1,
        planned_steps=1,
        stage=None,
        tolerated_share=0.25,
        note=None,
    )
    *_, optional, _ = step.tables(torch.zeros(3), torch.zeros(3, dtype=torch.long))
    assert optional == {}  # the turn mode, which is off, gets none of it
    assert step.observations_B == [["page", "page two"], ["page"], []]
    first, second, lost = step.anchor_B_K1.tolist()
    assert first[:2] == second[:2] and len(set(first)) == 3 and second[2] == -1 and lost == [-1] * 3


@pytest.mark.parametrize(
    "signals, scored, counts",
    [
        (["tool_reward"], False, True),
        (["info_gain"], False, False),
        (["info_gain"], True, True),
        (["infopo"], False, False),
        (["info_gain", "tool_reward"], False, True),
    ],
)
def test_a_step_that_scores_nothing_has_the_rewards_that_need_no_forward(signals, scored, counts):
    """In the warm-up of gains, rewards of tools, judges and functions are there all the same."""
    tokenizer = make_tokenizer()
    chosen = settings(turn_signals=dict.fromkeys(signals, 1.0))
    turns = turn_batch([Row(("ask", "page", "done"))], tokenizer)
    plan = replace(plan_gains(turns, chosen, tokenizer, scored=False), scored=scored)
    given = dict(signals={}, step=1, planned_steps=1, stage=None, tolerated_share=0.25, note=None)
    assert turn_step(plan, None, chosen, tokenizer, {}, **given).scored is counts
