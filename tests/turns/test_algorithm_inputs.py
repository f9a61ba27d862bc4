"""What a step brings to an algorithm of the user's, beside rewards."""

from dataclasses import replace

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, lost_row, turn_batch
from verl_credit.turns.score.gains import plan_gains
from verl_credit.turns.step.assign import CreditRun, assign, step_inputs
from verl_credit.turns.step.token_stage import TokenInputs

ASKED = []


def own(context):
    ASKED.append(context)
    return [
        [reward] * len(values) for reward, values in zip(context.rewards_G, context.logprobs_G, strict=True)
    ]


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
    log_prob_B_T = torch.zeros(turns.turn_ids_B_T.shape)
    mask_B_T = turns.response_mask_B_T.bool()
    ids_B_T = torch.zeros_like(turns.turn_ids_B_T)
    tokens = TokenInputs(1, mask_B_T, ids_B_T, log_prob_B_T, None, turns.row_valid_B)
    inputs = step_inputs(CreditRun.of(chosen, tokenizer), plan, None, {}, step=1, planned_steps=1)
    ASKED.clear()
    outcome_B = torch.tensor([0.0, 1.0, 0.0])
    step = assign(replace(inputs, tokens=tokens), outcome_B, torch.zeros(3, dtype=torch.long), mask_B_T)
    values_t = step.advantage_B_T[mask_B_T]
    assert step.metrics["credit/advantage/token_std"] == pytest.approx(values_t.std(correction=0).item())
    (context,) = ASKED
    assert list(context.observations_G) == [["page", "page two"], ["page"]]
    first, second, lost = step.tables.optional["anchor_B_K1"].tolist()
    assert first[:2] == second[:2] and len(set(first)) == 3 and second[2] == -1 and lost == [-1] * 3


@pytest.mark.parametrize(
    "signals, scored, rewards",
    [
        (["tool_reward"], False, True),
        (["info_gain"], False, False),
        (["info_gain"], True, True),
        (["info_gain", "tool_reward"], False, True),
    ],
)
def test_a_step_that_scores_nothing_has_the_rewards_that_need_no_forward(signals, scored, rewards):
    """In the warm-up of gains, rewards of tools, judges and functions are there all the same."""
    tokenizer = make_tokenizer()
    chosen = settings(turn_signals=dict.fromkeys(signals, 1.0))
    turns = turn_batch([Row(("ask", "page", "done"))], tokenizer)
    plan = replace(plan_gains(turns, chosen, tokenizer, scored=False), scored=scored)
    inputs = step_inputs(CreditRun(chosen, tokenizer), plan, None, {}, step=1, planned_steps=1)
    assert inputs.rewarding is rewards
