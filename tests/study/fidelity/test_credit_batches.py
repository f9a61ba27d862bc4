"""Modes see as many prompts at a time as a training batch has."""

import numpy as np
import pytest
import torch

from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.turn_credit import BatchTables
from verl_credit.study.fidelity.credits import mode_credits
from verl_credit.study.fidelity.turn_tables import TurnTables

PIPELINE = {
    "mode": "none", "outcome_operator": "grpo", "tied_groups": "keep", "turn_params": {},
    "shared": {"gamma": 1.0, "alpha": 0.5, "clip_beta": 0.3, "norm_by_std": True},
}  # fmt: skip


@pytest.fixture
def whole():
    rows, turns = 7, 2
    shape = rows, turns
    batch = BatchTables(
        outcome_B=torch.tensor([1.0, 0, 0, 1, 1, 0, 1]),
        reward_B_K=torch.rand(shape, generator=torch.Generator().manual_seed(0)).double(),
        has_reward_B_K=torch.ones(shape, dtype=torch.bool), group_B=torch.tensor([0, 0, 1, 1, 1, 2, 2]),
        valid_B=torch.ones(rows, dtype=torch.bool), n_tool_turns_B=torch.full((rows,), turns),
        optional={"anchor_B_K1": torch.zeros(rows, turns + 1, dtype=torch.long)},
    )  # fmt: skip
    return TurnTables(PIPELINE, batch)


def advantages(tables, mode, prompts):
    (credit,) = mode_credits(tables, [MODES[mode]], prompts)
    return credit.advantage_N


def test_batches_hold_neighbouring_prompts_and_number_them_anew(whole):
    first, rest = (part.batch for part in whole.batches(2))
    assert (first.group_B.tolist(), rest.group_B.tolist()) == ([0, 0, 1, 1, 1], [0, 0])
    for name in ("outcome_B", "reward_B_K", "valid_B", "n_tool_turns_B"):
        parts = [getattr(part, name) for part in (first, rest)]
        assert torch.equal(torch.cat(parts), getattr(whole.batch, name)), name
    assert [len(part.optional["anchor_B_K1"]) for part in (first, rest)] == [5, 2]


def test_a_mode_of_batch_scope_reads_its_batch_alone(whole):
    by_two = advantages(whole, "turn-group", 2)
    alone = [advantages(part, "turn-group", 9) for part in whole.batches(2)]
    assert np.array_equal(by_two, np.concatenate(alone))
    assert np.abs(by_two - advantages(whole, "turn-group", 3)).max() > 1e-3


@pytest.mark.parametrize("mode", ["joint", "separate", "gigpo"])
def test_a_mode_of_group_scope_reads_the_same_in_every_batch(whole, mode):
    assert np.array_equal(advantages(whole, mode, 1), advantages(whole, mode, 3))
