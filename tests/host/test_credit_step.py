"""The registered estimator: turns reach it through their step, and padding rows reach nothing."""

from dataclasses import replace

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.modes import NO_TABLES, read_by
from kit.turn_rows import Row, credited, estimate, lost_row, padding_row, step_inputs, turn_batch
from verl_credit.credit import turn_credit, turn_table
from verl_credit.errors import IntegrityError
from verl_credit.host.step.estimator import bring_turns, info_gain_advantage
from verl_credit.names import ANSWER_WHEN_SOLVED
from verl_credit.turns.step.assign import group_numbers

SEARCHED = [Row(("call", "page") * n + ("done",)) for n in (2, 1, 0, 2, 2, 1, 2, 1)]
BATCH = [*SEARCHED[:5], lost_row("connect"), *SEARCHED[5:]]
GROUPS = ["a", "a", "a", "b", "b", "b", "b", "c", "c"]
GAINS = [[0.4, 0.2], [-0.1], [], [0.3, -0.1], [0.2, 0.1], [], [0.05], [0.0, -0.2], [0.6]]
OUTCOMES = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.0]
ROWS = len(BATCH)

each_mode = pytest.mark.parametrize("mode", NO_TABLES)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def run(tokenizer, order=range(ROWS), gains=GAINS, **changes):
    """(advantages_B_T, step) of the batch in this order; places past its end are padding rows."""
    rows = BATCH + [padding_row(BATCH[0])] * 3
    turns = turn_batch([rows[place] for place in order], tokenizer)
    columns = [*gains, [], [], []], [*OUTCOMES, 0.0, 0.0, 0.0], [*GROUPS, "pad", "pad", "pad"]
    gains, outcomes, groups = ([column[place] for place in order] for column in columns)
    step = credited(turns, gains, outcomes, groups, **changes)
    return step.advantage_B_T, step


def unnamed(tables):
    """As `turn_credit` is called."""
    return tables.outcome_B, tables.reward_B_K, tables.has_reward_B_K, tables.group_B


@each_mode
def test_a_row_lost_to_a_tool_fault_gets_nothing_and_gives_nothing(tokenizer, mode):
    others = [0, 1, 2, 3, 4, 6, 7, 8]
    alone, _ = run(tokenizer, others, info_gain_norm_mode=mode)
    lost, step = run(tokenizer, info_gain_norm_mode=mode)
    assert torch.equal(lost[others], alone)
    assert not lost[5].any() and (step.clip_scale_B_T[5] == 1).all()


def test_the_gold_answers_probability_is_a_mean_over_the_rows_that_are_right(tokenizer):
    """Rows 0, 2, 3 and 4 are right. Row 2's was not scored; 5 was lost to a fault; 7's outcome of .5 is not above .5."""
    probability = torch.tensor([0.9, 0.1, float("nan"), 0.6, 0.3, 1.0, 0.2, 1.0, 0.0])
    turns = turn_batch(BATCH, tokenizer)
    inputs = replace(step_inputs(turns, GAINS), answer_B=probability)
    outcomes = [*OUTCOMES[:5], 1.0, *OUTCOMES[6:]]
    step = estimate(inputs, turns, outcomes, GROUPS)
    assert step.metrics[ANSWER_WHEN_SOLVED] == pytest.approx((0.9 + 0.6 + 0.3) / 3)
    assert ANSWER_WHEN_SOLVED not in estimate(inputs, turns, [0.0] * ROWS, GROUPS).metrics


@pytest.mark.parametrize("mode", ["turn-group-v1d", "turn-group-unbiased"])
def test_a_step_that_scores_no_gains_keeps_the_modes_outcome_term(tokenizer, mode):
    """`info_gain_every`: from a scored step to the next the outcome's scale must not change."""
    scored, _ = run(tokenizer, info_gain_norm_mode=mode, adv_rescale_alpha=0.0)
    unscored, step = run(tokenizer, gains=[[]] * ROWS, info_gain_norm_mode=mode)
    assert torch.equal(scored, unscored) and (step.clip_scale_B_T == 1).all()


SETTINGS = [
    ({"gamma": 0.5}, {"gamma": 0.5}),
    ({"adv_rescale_alpha": 0.7}, {"alpha": 0.7}),
    ({"clip_beta": 0.1}, {"clip_beta": 0.1}),
    ({"norm_adv_by_std_in_grpo": False}, {"norm_by_std": False}),
    ({"info_gain_norm_mode": "separate"}, {"info_gain_norm_mode": "separate"}),
]


@pytest.mark.parametrize("changes, arguments", SETTINGS)
def test_every_setting_reaches_the_equations(tokenizer, changes, arguments):
    _, vetted = run(tokenizer)
    _, step = run(tokenizer, **changes)
    tables = unnamed(step.tables)
    direct = turn_credit(*tables, row_valid_B=step.tables.valid_B, **arguments)
    assert torch.equal(step.credit.advantage_B_K1, direct.advantage_B_K1)
    assert torch.equal(step.credit.clip_scale_B_K1, direct.clip_scale_B_K1)
    same = torch.equal(vetted.credit.advantage_B_K1, direct.advantage_B_K1)
    assert not same or not torch.equal(vetted.credit.clip_scale_B_K1, direct.clip_scale_B_K1)


def test_the_outcome_of_a_row_is_the_sum_of_its_token_rewards(tokenizer):
    """With the KL penalty in the reward every token has one."""
    turns = turn_batch(BATCH, tokenizer)
    rewards_B_T = torch.arange(turns.turn_ids_B_T.numel()).view(turns.turn_ids_B_T.shape) / 8
    with bring_turns(step_inputs(turns, GAINS)) as found:
        advantages, returns = info_gain_advantage(rewards_B_T, turns.response_mask_B_T, index=GROUPS)
    assert torch.equal(found.credit.tables.outcome_B, rewards_B_T.sum(dim=1))
    assert found.credit.tables.group_B.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert torch.equal(advantages, returns) and advantages.data_ptr() != returns.data_ptr()


@pytest.mark.parametrize("first", [float("nan"), None], ids=["lost", "missing"])
@each_mode
def test_a_gain_that_is_not_there_is_missing_as_in_the_library(tokenizer, mode, first):
    _, step = run(tokenizer, gains=[[first, 0.2], *GAINS[1:]], info_gain_norm_mode=mode)
    ids_B_T = step.inputs.turns.turn_ids_B_T
    counts = {"n_tool_turns_B": turn_table(ids_B_T, ids_B_T >= 0).n_tool_turns_B} if first is None else {}
    options = {"row_valid_B": step.tables.valid_B, **counts, **read_by(mode, alpha=0.3)}
    direct = turn_credit(*unnamed(step.tables), **options)
    assert torch.equal(step.credit.advantage_B_K1, direct.advantage_B_K1)
    assert torch.equal(step.credit.clip_scale_B_K1, direct.clip_scale_B_K1)
    assert step.credit.counts["nonfinite_rewards"] == (first is not None) and not step.rewarded_B_K[0, 0]


def test_an_outcome_that_is_not_finite_stops_the_run(tokenizer):
    turns = turn_batch(BATCH, tokenizer)
    with pytest.raises(IntegrityError, match="outcome of row 3 is nan"):
        credited(turns, GAINS, [1.0, 0.0, 1.0, float("nan"), *OUTCOMES[4:]], GROUPS)


def test_turns_are_gone_after_the_step_even_when_it_failed(tokenizer):
    _, step = run(tokenizer)
    with pytest.raises(KeyError), bring_turns(step.inputs):
        raise KeyError("the step failed")
    with pytest.raises(RuntimeError, match="set trainer.v1.trainer_mode=credit"):
        info_gain_advantage(torch.zeros(ROWS, 3), torch.ones(ROWS, 3), index=GROUPS)


def test_groups_are_numbered_in_order_of_appearance():
    assert group_numbers(["x", 7, "x", ("y",), 7]).tolist() == [0, 1, 0, 2, 1]
