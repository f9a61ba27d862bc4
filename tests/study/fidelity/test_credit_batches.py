"""Modes see as many prompts at a time as a training batch has."""

import dataclasses

import pytest
import torch

from verl_credit.credit.turn.modes import MODES
from verl_credit.study.fidelity.credits import batches, mode_credits
from verl_credit.study.fidelity.turn_tables import TurnTables

SIZES = [2, 3, 2]
PIPELINE = {
    "mode": "none", "outcome_operator": "grpo", "tied_groups": "keep", "turn_params": {},
    "shared": {"gamma": 1.0, "alpha": 0.5, "clip_beta": 0.3, "norm_by_std": True, "gain_scale": 1.0, "outcome_scale": 1.0},
}  # fmt: skip


def tables():
    rows, turns = sum(SIZES), 2
    drawn = torch.Generator().manual_seed(0)
    shape = rows, turns
    return TurnTables(
        pipeline=PIPELINE,
        outcome_B=torch.tensor([1.0, 0, 0, 1, 1, 0, 1]), reward_B_K=torch.rand(shape, generator=drawn).double(),
        has_reward_B_K=torch.ones(shape, dtype=torch.bool), group_B=torch.tensor([0, 0, 1, 1, 1, 2, 2]),
        valid_B=torch.ones(rows, dtype=torch.bool), n_tool_turns_B=torch.full((rows,), turns),
        tokens_B_K1=torch.ones(rows, turns + 1, dtype=torch.long), anchor_B_K1=None,
    )  # fmt: skip


def advantages(whole, mode, prompts, sizes=SIZES):
    (credit,) = mode_credits(whole, sizes, [MODES[mode]], prompts)
    return torch.tensor([turns for group in credit.advantages for turns in group])


def test_batches_hold_neighbouring_prompts_and_number_them_anew():
    whole = tables()
    first, rest = batches(whole, 2)
    assert (first.group_B.tolist(), rest.group_B.tolist()) == ([0, 0, 1, 1, 1], [0, 0])
    for field in dataclasses.fields(TurnTables):
        one = getattr(whole, field.name)
        if isinstance(one, torch.Tensor) and field.name != "group_B":
            parts = getattr(first, field.name), getattr(rest, field.name)
            assert torch.equal(torch.cat(parts), one), field.name


def test_a_mode_of_batch_scope_reads_its_batch_alone():
    whole = tables()
    by_two = advantages(whole, "turn-group", 2)
    first, rest = batches(whole, 2)
    alone = [advantages(first, "turn-group", 9, SIZES[:2]), advantages(rest, "turn-group", 9, SIZES[2:])]
    assert torch.equal(by_two, torch.cat(alone))
    assert (by_two - advantages(whole, "turn-group", 3)).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["joint", "separate", "gigpo"])
def test_a_mode_of_group_scope_reads_the_same_in_every_batch(mode):
    whole = dataclasses.replace(tables(), anchor_B_K1=torch.zeros(7, 3, dtype=torch.long))
    assert torch.equal(advantages(whole, mode, 1), advantages(whole, mode, 3))
