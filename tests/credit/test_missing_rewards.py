"""A tool turn without a reward, mode by mode: in no comparison of whole returns does it count as a measured 0."""

import pytest
import torch

from kit.modes import batch
from verl_credit.credit import MODES

NAN = float("nan")
WHOLE_RETURNS = ["turn-group-unbiased", "leave_one_out", "gigpo", "hgpo"]
WITH_MISSING = [
    [[0.4, 0.2], [None, None], [0.1, 0.0]],
    [[0.4, 0.2], [0.3, None], [0.1], [0.6, 0.1]],
    [[0.4, 0.2], [], [None], [-0.3]],
    [[0.4, 0.2, 0.1], [0.3, None, 0.7], [0.1]],
    [[0.2], [None, 0.3], [0.1]],
]


def credit_of(mode, rewards, outcomes=None, group=None, **options):
    given, more = batch(rewards, outcomes or [1.0, 0.0, 1.0, 0.0][: len(rewards)], group)
    rows, columns = len(rewards), given[1].shape[1] + 1
    tables = {
        "anchor_B_K1": torch.arange(columns).expand(rows, columns),
        "turn_tokens_B_K1": torch.ones(rows, columns),
        "value_B_K1": torch.zeros(rows, columns),
    }
    tables = {name: table for name, table in tables.items() if name in MODES[mode].needs}
    return MODES[mode](*given, **more, **tables, **options)


def lost(rewards):
    return [[NAN if reward is None else reward for reward in row] for row in rewards]


@pytest.mark.parametrize("mode", WHOLE_RETURNS)
@pytest.mark.parametrize("rewards", WITH_MISSING)
def test_a_missing_reward_is_to_whole_returns_what_a_lost_one_is(mode, rewards):
    missing, as_lost = credit_of(mode, rewards), credit_of(mode, lost(rewards))
    assert torch.equal(missing.advantage_B_K1, as_lost.advantage_B_K1)
    assert missing.counts["turns_without_reward"] == as_lost.counts["nonfinite_rewards"] > 0
    measured = credit_of(mode, [[reward or 0.0 for reward in row] for row in rewards])
    assert not torch.equal(missing.advantage_B_K1, measured.advantage_B_K1)


@pytest.mark.parametrize("mode", ["turn-group-unbiased", "leave_one_out"])
def test_by_hand_the_row_with_a_gap_reads_its_outcome_and_is_in_nobodys_baseline(mode):
    """Outcomes 1, 0, 1 give .5, -1, .5. Rows 0 and 1 have returns .5, .2, 0 and .1, 0, 0: row 0 is .4 and .2 ahead."""
    credit = credit_of(mode, [[0.3, 0.2], [0.1], [None, 0.9]], [1.0, 0.0, 1.0], alpha=1.0)
    assert credit.advantage_B_K1[0].tolist() == pytest.approx([0.9, 0.7, 0.5])
    assert credit.advantage_B_K1[1, :2].tolist() == pytest.approx([-1.4, -1.2])
    assert credit.advantage_B_K1[2].tolist() == pytest.approx([0.5, 0.5, 0.5])


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.reads_turn_rewards])
def test_the_rows_that_a_mode_leaves_out_are_counted_by_it(mode):
    """What row 2 earned at its second turn moves no advantage if its row is left out."""
    group = [0, 0, 0, 1, 1]
    found = [
        credit_of(mode, [[0.3, 0.2], [0.1, 0.5], [None, later], [], [None]], [1.0, 1.0, 0.0, 0.0, 1.0], group)
        for later in (0.9, -0.9)
    ]
    assert torch.equal(*(credit.advantage_B_K1 for credit in found)) == MODES[mode].whole_returns
    assert found[0].counts.get("rows_left_out") == (1 if mode in WHOLE_RETURNS else None)


@pytest.mark.parametrize("mode", WHOLE_RETURNS)
def test_two_rows_of_which_one_is_not_measured_are_not_compared(mode):
    assert not credit_of(mode, [[0.5], [None]], [0.0, 0.0]).advantage_B_K1.any()
    assert credit_of(mode, [[0.5], [0.0]], [0.0, 0.0]).advantage_B_K1.any()


@pytest.mark.parametrize("mode", [*WHOLE_RETURNS, "progress", "mt_grpo", "turn_gae"])
def test_a_prompt_without_any_reward_is_as_one_whose_turns_earned_nothing(mode):
    """Prompt 1; prompt 0 has rewards."""
    outcomes, group = [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]
    bare = credit_of(mode, [[0.4], [0.1], [None, None], [None]], outcomes, group)
    zeros = credit_of(mode, [[0.4], [0.1], [0.0, 0.0], [0.0]], outcomes, group)
    assert torch.equal(bare.advantage_B_K1, zeros.advantage_B_K1)
    assert bare.counts["turns_without_reward"] == 3 and zeros.counts["turns_without_reward"] == 0


@pytest.mark.parametrize("mode", WHOLE_RETURNS)
def test_a_first_turn_that_no_row_is_measured_at_counts_0_in_all(mode):
    """first_turn="none"; the last row has no other tool turn."""
    bare = credit_of(mode, [[None, 0.5], [None, 0.2], [None]])
    zeros = credit_of(mode, [[0.0, 0.5], [0.0, 0.2], [0.0]])
    assert torch.equal(bare.advantage_B_K1, zeros.advantage_B_K1)


def test_progress_compares_no_row_without_a_score():
    """c = (.5, 0) with mean .25 in row 0, whose level has nobody to stand beside."""
    credit = credit_of("progress", [[0.5], [None]], [0.0, 0.0])
    assert credit.advantage_B_K1.tolist() == [[0.25, -0.25], [0.0, 0.0]]
    measured = credit_of("progress", [[0.5], [0.0]], [0.0, 0.0])
    assert measured.advantage_B_K1.tolist() == [[0.5, 0.0], [-0.25, -0.25]]
    silent = credit_of(
        "progress", [[0.5], []], [0.0, 0.0]
    )  # it answered at once: no progress, and that is known
    assert silent.advantage_B_K1[0].tolist() == [0.5, 0.0]


def test_progress_takes_a_missing_reward_beside_others_for_a_state_without_a_score():
    rewards = [[0.2, None, 0.4], [0.1]]
    zeros = [[0.2, 0.0, 0.4], [0.1]]
    assert torch.equal(
        credit_of("progress", rewards).advantage_B_K1, credit_of("progress", zeros).advantage_B_K1
    )


def test_released_mt_grpo_compares_no_row_without_a_reward():
    for empty, same in (([None, None], True), ([], False)):
        ours = credit_of("mt_grpo", [[0.4], [0.1], empty], parity="released").advantage_B_K1
        others = credit_of("mt_grpo", [[0.4], [0.1], [NAN]], parity="released").advantage_B_K1
        assert torch.allclose(ours[:2, :2], others[:2, :2], atol=1e-12) == same


def test_turn_gae_gives_a_turn_without_a_reward_0():
    credit = credit_of("turn_gae", [[0.25, None]], [1.0])
    assert credit.advantage_B_K1.tolist() == [[1.25, 1.0, 1.0]]
    assert credit_of("turn_gae", [[0.25, NAN]], [1.0]).advantage_B_K1.tolist() == [[0.0, 0.0, 1.0]]


NEEDS = [("gigpo", "anchor_B_K1"), ("progress", "turn_tokens_B_K1"), ("turn_gae", "value_B_K1")]


@pytest.mark.parametrize("mode, name", NEEDS)
def test_a_table_with_answer_turns_needs_the_number_of_tool_turns_where_rewards_do_not_tell(mode, name):
    mode, table = MODES[mode], {name: torch.tensor([[1, 2, 3], [4, 2, 3]])}
    for rewards in ([[None, None], [None, None]], [[0.1, 0.2], [0.1]], [[NAN, 0.2], [0.1, None]]):
        given, more = batch(rewards, [1.0, 0.0])
        with pytest.raises(
            ValueError, match=f"{name} without n_tool_turns_B: row [01] has no reward in the last"
        ):
            mode(*given, **table)
        mode(*given, **table, **more)
        mode(*given, **table, row_valid_B=torch.zeros(2).bool())
    given, more = batch([[None, 0.2], [0.1, NAN]], [1.0, 0.0])  # the last column tells
    assert torch.equal(mode(*given, **table).advantage_B_K1, mode(*given, **table, **more).advantage_B_K1)
    given, more = batch([[], []], [1.0, 0.0])
    assert mode(*given, **{name: table[name][:, :1]}).advantage_B_K1.shape == (2, 1)
