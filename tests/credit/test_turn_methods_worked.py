"""The turn methods' worked numbers, their options, and what they refuse."""

import math
from dataclasses import replace

import pytest
import torch

from kit import turn_lists
from kit.each import each
from kit.modes import batch
from verl_credit.credit import MODES, gigpo, hgpo, leave_one_out, mt_grpo, progress, rloo, turn_gae
from verl_credit.credit.laws import check, registered_subject
from verl_credit.credit.laws.drawn_world import make_world
from verl_credit.credit.laws.subjects import run_turn_mode

NAN = float("nan")
none = MODES["none"]


def world(seed=0):
    """(positional tables, optional tables) of the laws' random batch."""
    w = make_world(seed)
    given = w.outcome_B, w.gain_B_K, w.has_gain_B_K, w.group_B
    names = (
        "n_tool_turns_B",
        "anchor_B_K1",
        "value_B_K1",
        "state_score_B_K1",
        "initial_score_B",
        "turn_tokens_B_K1",
    )
    return given, {name: getattr(w, name) for name in names}


def of(mode, optional):
    return {name: table for name, table in optional.items() if name in (*mode.tables, "n_tool_turns_B")}


def turns(credit, *lengths):
    return turn_lists.turns(credit, lengths)


def close(*rows, tolerance=1e-9):
    return turn_lists.close(rows, tolerance)


def test_turn_gae_worked():
    given, more = batch([[0.0]], [1.0])
    credit = turn_gae(*given, **more, value_B_K1=torch.tensor([[0.5, 0.2]]), gamma=0.95, lam=0.9)
    assert turns(credit, 2) == close((0.374, 0.8), tolerance=1e-6)


def test_gigpo_counts_each_trajectory_once_and_the_release_each_turn():
    given, more = batch([[], [0.0, 0.0, 0.0]], [1.0, 0.0])
    anchors = torch.full((2, 4), -1)
    ours = gigpo(*given, **more, anchor_B_K1=anchors)
    assert turns(ours, 1, 4) == close((0.5,), (-0.5,) * 4)
    released = gigpo(*given, **more, anchor_B_K1=anchors, parity="released")
    assert turns(released, 1, 4) == close((0.8,), (-0.2,) * 4, tolerance=1e-6)


def test_a_loop_favours_later_visits_and_first_visits_do_not():
    """Four visits of one state, a terminal reward of 1."""
    given, more = batch([[0.0] * 3], [1.0])
    loop = torch.zeros(1, 4).long()
    credit = gigpo(*given, **more, anchor_B_K1=loop, gamma=0.9)
    assert turns(credit, 4) == close((-0.13075, -0.04975, 0.04025, 0.14025), tolerance=1e-5)
    assert not gigpo(*given, **more, anchor_B_K1=loop, gamma=0.9, visits="first").advantage_B_K1.any()
    given, more = batch([[0.0], []], [1.0, 0.0])
    credit = gigpo(*given, **more, anchor_B_K1=torch.zeros(2, 2).long(), gamma=0.5, visits="first")
    # first visits return .5 and 0: mean .25; the second visit returns 1
    assert turns(credit, 2, 1) == close((0.5 + 0.25, 0.5 + 0.75), (-0.5 - 0.25,))


def test_visits_are_measured_by_the_spread_of_first_visits():
    """First visits return .5, 0 and .25: mean and std .25. The visit after a first one returns 1."""
    given, more = batch([[0.0], [0.0], [0.0]], [1.0, 0.0, 0.5])
    anchors = torch.tensor([[0, 0], [0, -1], [0, -1]])
    options = {"gamma": 0.5, "visits": "first", "norm": "mean_std_norm"}
    credit = gigpo(*given, **more, anchor_B_K1=anchors, **options)
    assert turns(credit, 2, 2, 2) == close((1 + 1, 1 + 3), (-1 - 1, -1), (0, 0), tolerance=1e-4)


@pytest.mark.parametrize("floor", [0.0, 1e-8, 1e-3])
def test_later_visits_of_a_state_get_0_where_its_first_visits_have_no_spread(floor):
    """First visits return .9 each, later ones 1: there is no std to measure .1 by."""
    given, more = batch([[0.0], [0.0]], [1.0, 1.0])
    options = {**more, "anchor_B_K1": torch.full((2, 2), 5), "gamma": 0.9, "visits": "first"}
    norm = {"norm": "mean_std_norm", "variance_floor": floor}
    assert not gigpo(*given, **options, **norm).advantage_B_K1.any()
    assert turns(gigpo(*given, **options), 2, 2) == close((0.0, 0.1), (0.0, 0.1))


TIES = [(gigpo, {}), (gigpo, {"visits": "first"}), (hgpo, {}), (hgpo, {"base_group": True})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["mean_std_norm", "mean_norm"])
@pytest.mark.parametrize("mode, options", TIES)
def test_sums_that_differ_by_rounding_alone_tie(mode, options, norm, dtype):
    """0 + .9 and .3 + .6, at turn 0 and in all; the answers alone are .9 and .6. A real difference is kept."""
    given, more = batch([[0.0], [0.3]], [0.9, 0.6])
    for far, apart in ((0.0, False), (1e-5, True)):
        outcome, reward = (given[0] + torch.tensor([far, 0.0])).to(dtype), given[1].to(dtype)
        anchors = torch.tensor([[1, 2], [1, 3]])
        credit = mode(outcome, reward, *given[2:], **more, anchor_B_K1=anchors, norm=norm, **options)
        assert credit.advantage_B_K1.any() == apart, far


HISTORY = batch([[0.0], [0.0], [0.0], []], [1.0, 1.0, 0.0, 0.5])
HISTORY_ANCHORS = torch.tensor([[0, 1], [0, 1], [2, 1], [3, -1]])


def hgpo_of(**options):
    given, more = HISTORY
    options = {"norm": "mean_norm", "history_length": 1, **options}
    return hgpo(*given, **more, anchor_B_K1=HISTORY_ANCHORS, **options)


def test_hgpo_keeps_a_level_whose_advantage_is_zero():
    """Turn 1: 1/3 among three, 0 among the two with the same turn before."""
    assert turns(hgpo_of(), 2, 2, 2, 1) == close((0, 2 / 15), (0, 2 / 15), (0, -2 / 3), (0,))
    assert hgpo_of(weight_offset=1).advantage_B_K1[0, 1].item() == pytest.approx(1 / 9)
    assert hgpo_of(length_weight_alpha=0.0).advantage_B_K1[0, 1].item() == pytest.approx(1 / 6)
    assert hgpo_of(history_length=0).advantage_B_K1[0, 1].item() == pytest.approx(1 / 3)


def test_hgpo_base_group_counts_each_trajectory_once():
    """R = 1, 1, 0, .5: deviations .375, .375, -.625, -.125 with weight 1."""
    expected = close((0.375 / 3, (2 / 3 + 0.375) / 6), (-0.625, (-4 / 3 - 0.625) / 3), (-0.125,))
    found = turns(hgpo_of(base_group=True), 2, 2, 2, 1)
    assert [found[0], found[2], found[3]] == expected


@pytest.mark.parametrize("parity", ["none", "released"])
def test_hgpo_a_better_outcome_lowers_an_answer_that_comes_to_a_state_a_second_time(parity):
    """Two visits return r / 2 and r, another trajectory's .25.

    r = .5: .25, .5, .25 have mean 1/3 and variance 1/72; (1/6) / std = sqrt(2).
    r = 1: .5, 1, .25 have mean 7/12 and variance 7/72; (5/12) / std = sqrt(25/14). Released code gives 1.41420 and 1.33630.
    """
    for outcome, answer in ((0.5, 2**0.5), (1.0, (25 / 14) ** 0.5)):
        given, more = batch([[0.0], []], [outcome, 0.25])
        credit = hgpo(*given, **more, anchor_B_K1=torch.zeros(2, 2).long(), gamma=0.5, parity=parity)
        assert credit.advantage_B_K1[0, 1].item() == pytest.approx(answer, abs=2e-5)


def test_turn_group_worked_where_gains_undo_outcomes():
    """Outcomes 1 and 0, gains -1 and 0: s = 1, acc = gamma^2 - 1 and 0, and d, half of their distance, is their std."""
    gamma = 0.9996**0.5
    for factor in (1.0, 3.0):
        given, more = batch([[-1.0], [0.0]], [factor, 0.0])
        d, half = factor * 2e-4, factor * 0.5
        z, outcome = d / ((d**2 + 1e-8) ** 0.5 + 1e-6), half / ((half**2 + 1e-8) ** 0.5 + 1e-6)
        credit = MODES["turn-group"](*given, **more, gamma=gamma)
        assert turns(credit, 2, 2) == close((-z + 1.5 * outcome, outcome), (z - 1.5 * outcome, -outcome))
        bare = MODES["turn-group"](*given, **more, gamma=gamma, variance_floor=0.0, eps=1e-300)
        assert turns(bare, 2, 2) == close((0.5, 1.0), (-0.5, -1.0))


@pytest.mark.parametrize("mode", [gigpo, hgpo], ids=lambda mode: mode.name)
@pytest.mark.parametrize("seed", range(3))
def test_a_turn_without_an_anchor_is_alone_in_its_state(mode, seed):
    given, optional = world(seed)
    anchors, more = optional["anchor_B_K1"], {"n_tool_turns_B": optional["n_tool_turns_B"]}
    own = torch.where(anchors == -1, 100 + torch.arange(anchors.numel()).view_as(anchors), anchors)
    assert (anchors == -1).any()
    ours, theirs = (mode(*given, **more, anchor_B_K1=table) for table in (anchors, own))
    assert torch.equal(ours.advantage_B_K1, theirs.advantage_B_K1)


@pytest.mark.parametrize("mode", [gigpo, hgpo, leave_one_out, mt_grpo, progress], ids=lambda mode: mode.name)
def test_a_row_that_lost_a_reward_is_no_member_and_reads_its_outcome(mode):
    given, more = batch([[0.4, 0.2], [NAN, 0.5], [0.1, 0.0]], [1.0, 0.0, 1.0])
    optional = {"anchor_B_K1": torch.tensor([[0, 1, 2]] * 3), "turn_tokens_B_K1": torch.ones(3, 3)}
    optional = of(mode, optional)
    credit = mode(*given, **more, **optional)
    assert credit.counts["nonfinite_rewards"] == 1
    row = credit.advantage_B_K1[1]
    if mode is mt_grpo:
        row = row[[0, 2]]  # turn 1 still has its reward
    outcome = -1.0 if mode is leave_one_out else -2 / 3
    if mode in (hgpo, mt_grpo):
        outcome /= (1 / 3) ** 0.5
    assert row.tolist() == pytest.approx([outcome] * len(row), rel=1e-3)


def test_gigpo_divides_the_outcome_of_a_row_that_lost_a_reward_by_the_spread_of_n_minus_1():
    """Outcomes 1, 0, 1: their std is (1/3)**.5, and with n (2/9)**.5."""
    given, more = batch([[0.4], [NAN], [0.1]], [1.0, 0.0, 1.0])
    credit = gigpo(*given, **more, anchor_B_K1=torch.zeros(3, 2).long(), norm="mean_std_norm")
    assert turns(credit, 2, 2)[1] == pytest.approx([-2 / 3 / (1 / 3) ** 0.5] * 2, rel=1e-5)


def test_what_a_lost_reward_leaves_in_the_other_branches():
    given, more = batch([[0.4], [NAN], [0.1]], [1.0, 0.0, 1.0])
    last = leave_one_out(*given, **more, outcome="last_turn", alpha=0.5)
    assert turns(last, 2, 2, 2) == close((0.15, 0.0), (-0.5, -0.5), (-0.15, 0.0))
    released = mt_grpo(*given, **more, result_turn_B=torch.zeros(3).long(), parity="released")
    expected = (1.28402, 0.57725), (-1.1545, -1.1545), (-0.12952, 0.57725)
    assert turns(released, 2, 2, 2) == close(*expected, tolerance=1e-4)
    unanswered = mt_grpo(*given, **more, result_turn_B=torch.tensor([0, -1, 0]), parity="released")
    assert torch.equal(unanswered.advantage_B_K1, released.advantage_B_K1)  # not z of a sum that is not known
    given, more = batch([[0.5, NAN, 0.25]], [1.0])
    assert turns(turn_gae(*given, **more, value_B_K1=torch.zeros(1, 4)), 4) == close((0, 0, 1.25, 1))


def test_released_mt_grpo_takes_the_first_turn_with_a_reward_if_it_is_not_told():
    given, more = batch([[None, 0.5, 0.1], [0.2], []], [1.0, 0.0, 0.5])
    told = mt_grpo(*given, **more, result_turn_B=torch.tensor([1, 0, -1]), parity="released")
    assert torch.equal(mt_grpo(*given, **more, parity="released").advantage_B_K1, told.advantage_B_K1)
    assert told.advantage_B_K1[0, 0] == told.advantage_B_K1[0, 1] != told.advantage_B_K1[0, 2]


SCORES = {
    "state_score_B_K1": torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
    "turn_tokens_B_K1": torch.ones(2, 2),
    "gamma": 0.0,
}


def test_an_initial_score_lets_the_first_turn_earn():
    """The first turn solves it: outcomes +-.5, progress +-.5, and its own share in turn 0."""
    given, more = batch([[None], [None]], [1.0, 0.0])
    initial = torch.zeros(2)
    credit = progress(*given, **more, **SCORES, initial_score_B=initial)
    assert turns(credit, 2, 2) == close((1.5, 0.5), (-1.0, -1.0))
    for options in ({}, {"initial_score_B": torch.full((2,), NAN), "parity": "released"}):
        assert turns(progress(*given, **more, **SCORES, **options), 2, 2) == close((0.5, 0.5), (-0.5, -0.5))
    level = progress(*given, **more, **SCORES, initial_score_B=initial, beta=0.0, progress_weight=0.0)
    assert torch.equal(level.advantage_B_K1, none(*given, norm_by_std=False).advantage_B_K1)


def test_a_row_without_scores_is_not_compared_with_progress():
    given, more = batch([[None], [None], [None]], [1.0, 1.0, 1.0])
    scores = torch.tensor([[NAN, NAN], [0.1, 0.9], [0.5, 0.7]])
    options = {**more, "state_score_B_K1": scores, "turn_tokens_B_K1": torch.ones(3, 2), "gamma": 1.0}
    assert turns(progress(*given, **options), 2, 2, 2) == close(
        (0, 0), (0.3, 0.3), (-0.3, -0.3), tolerance=1e-6
    )
    assert progress(*given, **options, parity="released").advantage_B_K1[0, 0].item() == pytest.approx(-1 / 3)


@pytest.mark.parametrize("seed", range(3))
def test_the_token_weighted_mean_of_progress_is_the_level(seed):
    given, optional = world(seed)
    optional = of(progress, optional)
    shaped, level = progress(*given, **optional), progress(*given, **optional, beta=0.0)
    columns = torch.arange(given[1].shape[1] + 1)
    tokens = optional["turn_tokens_B_K1"] * (columns <= given[2].sum(dim=1, keepdim=True))
    mean = (tokens * shaped.advantage_B_K1).sum(dim=1) / tokens.sum(dim=1)
    assert torch.allclose(mean, level.outcome_advantage_B, atol=1e-12)
    assert not torch.allclose(shaped.advantage_B_K1, level.advantage_B_K1)


@pytest.mark.parametrize("seed", range(3))
def test_without_state_scores_turn_rewards_are_the_progress(seed):
    given, optional = world(seed)
    _, gain, mask, group = given
    tokens = {name: optional[name] for name in ("n_tool_turns_B", "turn_tokens_B_K1")}
    score = torch.nn.functional.pad(torch.where(mask, gain, 0.0), (0, 1)).cumsum(dim=1)
    told = progress(*given, **tokens, state_score_B_K1=score, initial_score_B=torch.zeros(len(group)))
    assert torch.allclose(progress(*given, **tokens).advantage_B_K1, told.advantage_B_K1, atol=1e-12)


def test_anchors_and_scores_are_counted():
    given, more = batch([[0.0], [], [0.0], []], [1.0, 0.0, 1.0, 0.0], group=[0, 0, 1, 1])
    anchors = torch.tensor([[4, 4], [5, 4], [4, -1], [6, 4]])
    valid = torch.tensor([True, True, True, False])
    counts = gigpo(*given, **more, anchor_B_K1=anchors, row_valid_B=valid).counts
    assert (counts["turns_without_anchor"], counts["states"], counts["states_of_one"]) == (1, 3, 2)
    scores = torch.tensor([[0.5, NAN], [NAN, 9.0], [NAN, 0.2], [NAN, 9.0]])
    tables = {"state_score_B_K1": scores, "turn_tokens_B_K1": torch.ones(4, 2)}
    counts = progress(*given, **more, **tables, row_valid_B=valid).counts
    assert (counts["turns_without_score"], counts["groups_with_and_without_scores"]) == (3, 1)


REFUSED = [
    (gigpo, {"norm": "mean_nrom"}, "norm='mean_nrom' is not known .did you mean 'mean_norm'.*mean_std_norm"),
    (gigpo, {"visits": 1}, "visits=1 is not known; accepted: all, first"),
    (gigpo, {"visits": "first", "parity": "released"}, "visits='first' with parity='released'"),
    (gigpo, {"step_weight": -1.0}, "step_weight=-1.0: expected a number at least 0"),
    (gigpo, {"anchor_B_K1": None}, "info_gain_norm_mode='gigpo' needs anchor_B_K1, which is not given"),
    (gigpo, {"anchor_B_K1": torch.zeros(13, 4)}, "anchor_B_K1 has dtype torch.float32; ids, -1 for none, are integers"),
    (gigpo, {"value_B_K1": torch.zeros(13, 4)}, "^value_B_K1 with info_gain_norm_mode='gigpo': that mode does not read"),
    (gigpo, {"alpha": 0.3}, "alpha=0.3 with info_gain_norm_mode='gigpo': that mode does not read it"),
    (hgpo, {"history_length": 1.5}, "history_length=1.5: expected a whole number at least 0"),
    (hgpo, {"base_group": "no"}, "base_group='no': expected True or False"),
    (none, {"norm_by_std": 0}, "norm_by_std=0: expected True or False"),
    (hgpo, {"weight_offset": 0}, "weight_offset=0: expected a whole number at least 1"),
    (leave_one_out, {"outcome": "last"}, "outcome='last' is not known.*separate, last_turn"),
    (leave_one_out, {"baseline": "none"}, "baseline='none' is not known.*absent_zero, present_only"),
    (mt_grpo, {"parity": "release"}, "parity='release' is not known .did you mean 'released'"),
    (turn_gae, {"lam": 1.5}, "lam=1.5: expected a number at least 0 and at most 1"),
    (turn_gae, {"value_B_K1": torch.full((13, 4), NAN)}, "value_B_K1 row 0, turn 0 is nan; expected finite"),
    (turn_gae, {"bootstrap_B": torch.full((13,), NAN)}, "bootstrap_B row 0 is nan; expected finite values"),
    (progress, {"turn_tokens_B_K1": -torch.ones(13, 4)}, "turn_tokens_B_K1 row 0, turn 0 is -1; expected 0 or"),
    (progress, {"initial_score_B": torch.full((13,), -torch.inf)}, "initial_score_B row 0 is -inf; expected finite"),
    (progress, {"state_score_B_K1": None}, "initial_score_B without state_score_B_K1"),
    (progress, {"parity": "released"}, "initial_score_B with parity='released': released code has no score before"),
    (mt_grpo, {"result_turn_B": torch.full((13,), 99)}, "result_turn_B row 0 is 99; expected a turn's number, -1 for"),
    (mt_grpo, {"result_turn_B": torch.full((13,), -5)}, "result_turn_B row 0 is -5; expected a turn's number"),
    (gigpo, {"norm": "mean_norm", "eps": 100.0}, "eps=100.0 with norm='mean_norm': there is no std .*leave it at 1e-06"),
    (gigpo, {"variance_floor": 7.0}, "variance_floor=7.0 with norm='mean_norm': there is no std"),
    (hgpo, {"norm": "mean_norm", "eps": 100.0}, "eps=100.0 with norm='mean_norm'"),
    (none, {"outcome_operator": "rloo", "ddof": 0}, "ddof=0 with outcome_operator='rloo': only grpo reads it; leave"),
    (none, {"outcome_operator": rloo, "eps": 5.0}, "eps=5.0 with outcome_operator=rloo: only grpo reads it"),
    (none, {"norm_by_std": False, "eps": 1.0}, "eps=1.0 with norm_by_std=False: there is no std .*leave it at 1e-06"),
    (MODES["joint"], {"norm_by_std": False, "ddof": 1}, "ddof=1 with norm_by_std=False: there is no std"),
    (mt_grpo, {"result_turn_B": torch.ones(13, dtype=torch.long)}, "result_turn_B with parity='none': only"),
    (gigpo, {"n_tool_turns_B": torch.ones(13)}, "n_tool_turns_B has dtype torch.float32; numbers of turns are integers"),
    (progress, {"beta": NAN}, "beta=nan: expected a number at least 0"),
]  # fmt: skip


@each("mode, options, message", REFUSED)
def test_what_they_refuse(mode, options, message):
    given, optional = world()
    options = of(mode, optional) | options
    with pytest.raises((ValueError, TypeError), match=message):
        mode(*given, **options)


RANGES = {(name, option): range for name, mode in MODES.items() for option, range in mode.ranges.items()}


@each("mode, option", RANGES)
def test_a_bound_is_accepted_where_it_belongs_to_the_range(mode, option):
    of_option = RANGES[mode, option]
    for bound, allowed in ((of_option.low, of_option.low_allowed), (of_option.high, of_option.high_allowed)):
        if allowed:
            MODES[mode].check_options({option: bound})
        elif math.isfinite(bound):
            with pytest.raises(ValueError, match=rf"^{option}={bound!r}: expected a number "):
                MODES[mode].check_options({option: bound})


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_every_number_has_a_range(mode):
    numbers = {name for name, default in mode.options.items() if type(default) in (int, float)}
    assert numbers == set(mode.ranges)


@pytest.mark.parametrize("mode", [gigpo, hgpo, mt_grpo, progress, turn_gae], ids=lambda mode: mode.name)
def test_an_empty_batch(mode):
    given, optional = world()
    optional = {name: table[:0] for name, table in of(mode, optional).items()}
    assert mode(*(table[:0] for table in given), **optional).advantage_B_K1.shape == (0, 4)


LAST_TURN = {
    "outcome": "last_turn"
}  # a row that has ended counts with 0 at the others' last turns, where outcomes tie too
VARIANTS = [
    ("gigpo", {"norm": "mean_std_norm", "visits": "first"}),
    ("gigpo", {"norm": "mean_std_norm", "visits": "first", "variance_floor": 1e-8}),
    ("hgpo", {"norm": "mean_norm", "base_group": True, "history_length": 4}),
    ("g2po", {"norm": "mean_std_norm", "parity": "released"}),
    ("leave_one_out", LAST_TURN),
    ("leave_one_out", {"baseline": "present_only"}),
    ("mt_grpo", {"parity": "released"}),
    ("progress", {"parity": "released", "beta": 0.3}),
    ("turn_gae", {"lam": 0.5, "negative": 0.5}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, options", VARIANTS)
def test_other_options_keep_the_laws_too(name, options):
    def run(world):
        if options.get("parity") == "released":  # which refuses scores of the state before the first turn
            world = world.but(initial_score_B=torch.full_like(world.initial_score_B, NAN))
        return run_turn_mode(world, mode=MODES[name], **options)

    subject = registered_subject("turn", name)
    exempt = {"ties": "", "no_gains": ""} if options == LAST_TURN else subject.exempt
    if options.get("norm") == "mean_norm":  # without a std to divide by, hgpo's answer never falls
        exempt = {"better_tools" if law == "better" else law: why for law, why in exempt.items()}
    subject = replace(subject, run=run, properties=None, exempt=exempt)
    wrong = [finding for finding in check(subject) if finding.wrong]
    assert not wrong, "\n".join(f"{finding.name}: {finding.detail}" for finding in wrong)
