"""Credit made again from the tables of a step is the credit that the step was trained with."""

import pytest
import torch

from kit.credit_tables import GROUPS, OUTCOMES, write_step
from kit.modes import NO_TABLES
from verl_credit.credit import MODES, TRANSFORMS
from verl_credit.records.report.again import (
    NotOffered,
    as_the_run_did,
    credit_of_tokens,
    credit_of_turns,
    on_tokens,
    places,
    token_tables,
    turn_tables,
)
from verl_credit.records.run.rollouts import read_tokens
from verl_credit.records.run.tables import ROLLOUTS, TURNS, read_table, table_path

LOSSES = [[None, 0.2], [0.1], [float("nan"), 0.3], [], [0.3], [-0.1, None], [], [0.0], [0.2]]


def read(folder, number=3, group=0):
    turns = turn_tables(read_table(table_path(folder, TURNS, number)))
    return turns, token_tables(read_tokens(table_path(folder, ROLLOUTS, number)), group)


def of_group(advantages_B_T, tokens):
    """The stored layout: the policy's tokens alone, by row."""
    return [tokens.advantage_G_T[i][tokens.turn_ids_G_T[i] >= 0] for i in range(len(tokens.rows))]


PAIRS = [
    *((mode, "gtpo_sepa_hicra") for mode in NO_TABLES),
    *(("turn-group-v1d", transform) for transform in TRANSFORMS if transform != "gtpo_sepa_hicra"),
]


@pytest.mark.parametrize("mode, transform", PAIRS)
def test_the_runs_own_settings_give_its_advantages(tmp_path, mode, transform):
    """Every mode and every transform, one token rejected, gamma and alpha off their defaults.

    A transform gets the turns' advantages and does not know the mode, so that not every pair is tried.
    """
    shared = {"gamma": 0.9, "adv_rescale_alpha": 0.7, "reject": [1]}
    advantages_B_T, _, turns, *_ = write_step(
        tmp_path, transform_mode=transform, info_gain_norm_mode=mode, **shared
    )
    for group in (0, 2, 3):
        tables, tokens = read(tmp_path, group=group)
        made_G_T = as_the_run_did(tables, tokens)
        for place, row in enumerate(tokens.rows):
            written = turns.turn_ids_B_T[row] >= 0
            want, got = advantages_B_T[row][written], made_G_T[place][tokens.turn_ids_G_T[place] >= 0]
            assert torch.allclose(got.double(), want.double(), atol=1e-6, rtol=0)
            assert torch.equal(tokens.advantage_G_T[place][: int(written.sum())], want.float())
    assert advantages_B_T.any() and sorted(set(GROUPS)) == ["p", "pad", "q", "r"]


@pytest.mark.parametrize("changes", [
    {"advantage_mode": "maxrl"}, {"advantage_mode": "reinforce_pp"}, {"norm_adv_by_std_in_grpo": False},
    {"tied_groups": "skip"}, {"info_gain_norm_mode": "mt_grpo", "turn_params": {"turn_weight": 0.5}}, {"clip_beta": 0.7},
    {"info_gain_norm_mode": "gigpo"}, {"info_gain_norm_mode": "hgpo"},
    {"info_gain_norm_mode": "turn_gae", "turn_values": "group", "lam": 0.5,
     "turn_params": {"scale": "rms", "negative": 0.5}},
    {"info_gain_norm_mode": "turn-group", "gains": LOSSES},
])  # fmt: skip
def test_other_keys_of_the_run_act_again(tmp_path, changes):
    """Clip scales too; the last one loses a reward and has turns without one."""
    _, step, turns, *_ = write_step(tmp_path, **changes)
    tables, tokens = read(tmp_path)
    credit = credit_of_turns(tables, tables.pipeline["mode"])
    real = [row for row, padding in enumerate(turns.is_padding) if not padding]
    for place, row in enumerate(real):
        n = int(turns.n_turns_B[row])
        for name in ("advantage_B_K1", "clip_scale_B_K1"):
            want = getattr(step.credit, name)[row, :n].double()
            assert torch.allclose(getattr(credit, name)[place, :n], want, atol=1e-6, rtol=0)
            assert torch.equal(getattr(tables, name)[place, :n], want.float().double())
    made_G_T = as_the_run_did(tables, tokens)
    assert torch.allclose(made_G_T.float(), tokens.advantage_G_T, atol=1e-6, rtol=0)


def test_other_settings_give_what_the_library_gives(tmp_path):
    """alpha 0 is GRPO with v1d's constants: R for every turn; gamma 0 leaves each turn its own gain."""
    write_step(tmp_path)
    tables, _ = read(tmp_path)
    flat = credit_of_turns(tables, "turn-group-v1d", alpha=0.0)
    assert torch.equal(flat.advantage_B_K, flat.outcome_advantage_B[:, None].expand_as(flat.advantage_B_K))
    near = credit_of_turns(tables, "turn-group-v1d", gamma=0.0)
    assert not torch.allclose(near.advantage_B_K, credit_of_turns(tables, "turn-group-v1d").advantage_B_K)
    assert tables.outcome_B.tolist() == [o for o, g in zip(OUTCOMES, GROUPS, strict=True) if g != "pad"]


@pytest.mark.parametrize(
    "mode, said",
    [("turn_gae", "needs values"), ("gigpo", "needs anchors"), ("mine.mode", "an operator of yours")],
)
def test_what_the_tables_lack_is_not_offered(tmp_path, mode, said):
    write_step(tmp_path)
    with pytest.raises(NotOffered, match=said):
        credit_of_turns(read(tmp_path)[0], mode)


def test_a_step_without_turn_rewards_offers_no_mode_that_reads_them(tmp_path):
    write_step(
        tmp_path, gains=[[None, None], [None], [None, None], [], [None], [None, None], [], [None], [None]]
    )
    tables, tokens = read(tmp_path)
    for name, mode in MODES.items():
        if mode.reads_turn_rewards and name != "turn-group-v1d":
            with pytest.raises(NotOffered, match="no turn of this step has a reward|needs"):
                credit_of_turns(tables, name)
    assert credit_of_turns(tables, "none").outcome_advantage_B.any()
    made_G_T = as_the_run_did(*read(tmp_path, group=2))  # the run's own mode ran all the same
    assert (
        torch.allclose(made_G_T.float(), read(tmp_path, group=2)[1].advantage_G_T, atol=1e-6)
        and made_G_T.any()
    )
    with pytest.raises(NotOffered, match="no SEPA lambda"):
        credit_of_tokens(tokens, tokens.advantage_G_T, "gtpo_sepa")
    with pytest.raises(NotOffered, match="replaces the turns' credit"):
        credit_of_tokens(tokens, tokens.advantage_G_T, "grpo_s")


@pytest.mark.parametrize(
    "mode, transform", [pair for pair in PAIRS if pair[0] in ("turn-group-v1d", "joint", "none")]
)
def test_a_tokens_credit_is_the_turns_size_times_the_credit_of_one(tmp_path, mode, transform):
    """What the page relies on: A_t = |A_turn| c(sign A_turn), where c(+1) and c(-1) are the library's credit of turns
    that all have +1 or all -1."""
    write_step(tmp_path, transform_mode="gtpo_sepa_hicra")
    for group in (0, 2, 3):
        tables, tokens = read(tmp_path, group=group)
        turn_G_T = on_tokens(
            credit_of_turns(tables, mode).advantage_B_K1[places(tables, tokens.rows)], tokens
        )
        one_G_T = torch.ones_like(turn_G_T)
        up_G_T, down_G_T = (credit_of_tokens(tokens, sign * one_G_T, transform, 0.5) for sign in (1, -1))
        made_G_T = turn_G_T.abs() * torch.where(turn_G_T < 0, down_G_T, up_G_T)
        want_G_T = credit_of_tokens(tokens, turn_G_T, transform, 0.5)
        assert torch.allclose(made_G_T, want_G_T, atol=1e-6, rtol=0)
