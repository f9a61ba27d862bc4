"""What the trainer brings to an algorithm of the user's, beside rewards."""

from types import SimpleNamespace

import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, lost_row, turn_batch
from verl_credit.host.step.trainer import CreditTrainer


def own(context):
    return [[0.0] * len(values) for values in context.logprobs_G]


def test_states_and_texts_of_every_turn():
    tokenizer = make_tokenizer()
    rows = [
        Row(("ask", "page", "again", "page two", "done")),
        Row(("seek", "page", "done")),
        lost_row("connect"),
    ]
    step = SimpleNamespace(signals={}, anchor_B_K1=None, observations_B=None)
    trainer = SimpleNamespace(
        _turns=turn_batch(rows, tokenizer), _signals={}, _step=step, tokenizer=tokenizer, run_dir=None,
        settings=settings(info_gain_norm_mode="none", algorithm_mode=f"{__name__}.own"),
        config=SimpleNamespace(faults=SimpleNamespace(max_lost_rewards=0.25)),
    )  # fmt: skip
    nothing, group_B = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    *_, optional, _ = CreditTrainer._tables(
        trainer, nothing, nothing.bool(), None, False, torch.zeros(3), group_B
    )
    assert optional == {}  # the turn mode, which is off, gets none of it
    assert step.observations_B == [["page", "page two"], ["page"], []]
    first, second, lost = step.anchor_B_K1.tolist()
    assert first[:2] == second[:2] and len(set(first)) == 3 and second[2] == -1 and lost == [-1] * 3
