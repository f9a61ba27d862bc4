"""`algorithm.info_gain_norm_mode` and `algorithm.turn_params`: names, dotted paths and options."""

import pytest
import torch

from kit.recipes import check, refused
from verl_credit.config.settings import CreditSettings
from verl_credit.credit import INFO_GAIN_NORM_MODES

MODE, PARAMS = "algorithm.info_gain_norm_mode", "algorithm.turn_params"
HERE = __name__
DYNAMIC = "actor_rollout_ref.actor.policy_loss.dynamic_clip=auto"


def halved(tables, *, share: float = 0.5):
    """A lawful mode: the outcome's advantage, times a share for tool turns."""
    outcome_B = tables.outcome_advantage("grpo")
    return share * outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


def from_values(tables):
    raise AssertionError("called with values" if tables.value_B_K1 is not None else "called without values")


from_values.needs, from_values.reads = ("value_B_K1",), ("rewards", "values")


def short(tables):
    return tables.outcome_B, tables.ones()


def undefined(tables):
    outcome_B = tables.outcome_B / 0 * 0
    return outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


def transposed(tables):
    return tables.reward_B_K.T, tables.outcome_B, torch.ones(2)


def test_a_mistyped_mode_is_refused_with_all_names_and_the_nearest():
    error = refused(f"{MODE}=turn-grup")
    assert (error.key, error.value) == (MODE, "turn-grup")
    assert error.accepted[:-1] == [*INFO_GAIN_NORM_MODES] and "did you mean" in str(error)


@pytest.mark.slow
def test_a_mode_of_ones_own_takes_its_options():
    check(f"{MODE}={HERE}.halved", f"+{PARAMS}.share=0.25", DYNAMIC)
    check(f"{MODE}=joint", f"+{PARAMS}.eps=1e-3", DYNAMIC)


@pytest.mark.parametrize(
    "name, message",
    [
        ("short", "returned 2 values; expected (advantage_B_K, outcome_advantage_B, clip_scale_B_K)"),
        ("undefined", "returned advantage_B_K: nan in row 1"),
        ("transposed", "returned advantage_B_K: shape (3, 13)"),
        ("absent", "has no 'absent'"),
    ],
)
def test_a_mode_that_cannot_run_is_refused_before_the_start(name, message):
    error = refused(f"{MODE}={HERE}.{name}")
    assert (error.key, error.value) == (MODE, f"{HERE}.{name}") and message in str(error)
    assert error.accepted == [*INFO_GAIN_NORM_MODES] or message in error.accepted


STD = "algorithm.norm_adv_by_std_in_grpo"


@pytest.mark.parametrize(
    "mode, option, given, said",
    [
        ("turn-group", "outcome_wieght", 1, "did you mean outcome_weight"),
        ("turn-group-v1d", "alpha", 1, "algorithm.adv_rescale_alpha"),  # it has a key of its own
        ("turn-group", "sigma_floor", 0, "sigma_floor=0: expected a number above 0"),
        ("mt_grpo", "parity", "release", "did you mean 'released'?"),
        (f"joint {STD}=false", "eps", 1e-3, "norm_by_std=False"),
    ],
)
def test_an_option_that_the_mode_does_not_take_is_refused(mode, option, given, said):
    error = refused(*f"{MODE}={mode}".split(), f"+{PARAMS}.{option}={given}")
    assert (error.key, error.value) in ((PARAMS, {option: given}), (f"{PARAMS}.{option}", given))
    assert said in error.accepted and ((STD in error.beside) == (option == "eps"))


@pytest.mark.slow
def test_a_lost_gain_counts_as_0_only_where_no_baseline_has_it():
    for mode in ("turn-group-unbiased", "leave_one_out"):
        error = refused(f"{MODE}={mode}", "algorithm.info_gain_on_error=zero")
        assert (error.key, error.value) == ("algorithm.info_gain_on_error", "zero")
    check(f"{MODE}=turn-group-unbiased", "algorithm.info_gain_on_error=drop")


@pytest.mark.slow
def test_a_signal_with_gaps_is_taken_by_every_mode_that_compares_whole_returns():
    check(f"{MODE}=turn-group-unbiased", "algorithm.info_gain_first_turn=none")
    check(f"{MODE}=turn-group-unbiased", "algorithm.turn_signal=column:steps")


@pytest.mark.parametrize("mode", ["turn_gae", f"{HERE}.from_values"])
def test_a_mode_that_needs_values_is_refused_without_them(mode):
    error = refused(f"{MODE}={mode}")
    assert (error.key, error.value) == (MODE, mode)
    assert "needs value_B_K1, and algorithm.turn_values is null: set it to group, features" in error.accepted


@pytest.mark.slow
def test_modes_with_anchors_need_no_signal_and_take_a_state_of_ones_own():
    for mode in ("gigpo", "hgpo", "g2po", "gagpo"):
        assert CreditSettings.from_config(check(f"{MODE}={mode}")).turn_signals == {}
    check(f"{MODE}=gigpo", f"algorithm.turn_anchor={HERE}.first_words", f"+{PARAMS}.step_weight=0.5")
    check(f"{MODE}=gigpo", "algorithm.turn_signal=info_gain")


def first_words(trajectory):
    return [turn.text.split(" ")[0] for turn in trajectory.turns]


def one_short(trajectory):
    return [turn.text for turn in trajectory.tool_turns]


@pytest.mark.slow
def test_rows_of_a_tied_group_are_skipped_only_where_groups_are_read():
    given = ["algorithm.turn_values=features", "algorithm.tied_groups=skip"]
    error = refused(f"{MODE}=turn_gae", *given)
    assert (error.key, error.value, error.beside) == ("algorithm.tied_groups", "skip", (MODE,))
    check(f"{MODE}=gigpo", "algorithm.tied_groups=skip")


@pytest.mark.parametrize(
    "anchor, accepted",
    [
        ("obervation", "observation, state, prefix"),
        (f"{HERE}.one_short", "states for trajectories of 2 and 1 turns"),
    ],
)
def test_an_anchor_that_cannot_be_meant_is_refused(anchor, accepted):
    error = refused(f"{MODE}=gigpo", f"algorithm.turn_anchor={anchor}")
    assert (error.key, error.value) == ("algorithm.turn_anchor", anchor)
    assert accepted in (error.accepted if isinstance(error.accepted, str) else ", ".join(error.accepted))
