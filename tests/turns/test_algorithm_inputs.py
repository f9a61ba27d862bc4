"""What a step brings to an algorithm of the user's, beside rewards."""

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
