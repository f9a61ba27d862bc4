"""Outcome operators beside GRPO: MaxRL, REINFORCE++, a user's own, and what becomes of tied prompts."""

import math
import statistics

import pytest
import torch

from kit.modes import NO_TABLES
from verl_credit.credit import grpo, half_negative, low_baseline, maxrl, reinforce_pp, rloo, turn_credit
from verl_credit.credit.plugins.calls import outcome_operator

NAN = float("nan")
each_seed = pytest.mark.parametrize("seed", range(4))


def batch(seed=0, rows=20, groups=5):
    """Outcomes 0, .5, 1, prompt ids in no order, a few rows that do not count."""
    generator = torch.Generator().manual_seed(seed)
    outcome_B = torch.randint(0, 3, (rows,), generator=generator).double() / 2
    group_B = torch.randint(0, groups, (rows,), generator=generator) * 7 - 11
    return outcome_B, group_B, torch.rand(rows, generator=generator) < 0.8


def of_one_prompt(operator, rewards, **options):
    outcome_B = torch.tensor(rewards, dtype=torch.float64)
    return operator(outcome_B, torch.zeros(len(rewards), dtype=torch.long), **options).tolist()


def prompts(group_B, valid_B):
    """Rows that count, prompt by prompt."""
    rows_of = {}
    for row in valid_B.nonzero().flatten().tolist():
        rows_of.setdefault(int(group_B[row]), []).append(row)
    return rows_of.values()


def loop_maxrl(outcomes, group_B, valid_B):
    result = [0.0] * len(outcomes)
    for rows in prompts(group_B, valid_B):
        mean = statistics.fmean(outcomes[row] for row in rows)
        for row in rows:
            result[row] = (outcomes[row] - mean) / (mean + 1e-6) if mean > 1e-6 else 0.0
    return result


def loop_reinforce_pp(outcomes, group_B, valid_B, weights):
    centred = {}
    for rows in prompts(group_B, valid_B):
        mean = statistics.fmean(outcomes[row] for row in rows)
        centred |= {row: outcomes[row] - mean for row in rows}
    total = sum(weights[row] for row in centred)
    mean = sum(weights[row] * value for row, value in centred.items()) / total
    std = math.sqrt(sum(weights[row] * (value - mean) ** 2 for row, value in centred.items()) / total)
    return [
        (centred[row] - mean) / math.sqrt(std**2 + 1e-8) if row in centred else 0.0
        for row in range(len(outcomes))
    ]


WORKED = [  # rewards, centred, MaxRL
    ([1, 0, 0, 0], [0.75] + [-0.25] * 3, [2.999988] + [-0.999996] * 3),
    ([1, 1, 1, 0], [0.25] * 3 + [-0.75], [0.333333] * 3 + [-0.999999]),  # the odds against a success
    ([0] * 4, [0] * 4, [0] * 4),
    ([1] * 4, [0] * 4, [0] * 4),
    ([1], [0], [0]),
    ([1e-7, 0], [5e-8, -5e-8], [0, 0]),  # a mean below eps is none
    ([0.5, -0.5, -1, 0.2], [0.7, -0.3, -0.8, 0.4], "row 1 is -0.5"),
    ([-1, 1, 0, 0], [-1, 1, 0, 0], "row 0 is -1"),
    ([1, -1, 0.1, 0], [0.975, -1.025, 0.075, -0.025], "row 1 is -1"),  # the mean would give 39 and -41
]


@pytest.mark.parametrize(("rewards", "centred", "by_mean"), WORKED)
def test_worked_rewards(rewards, centred, by_mean):
    assert of_one_prompt(grpo, rewards, norm_by_std=False) == pytest.approx(centred, abs=1e-6)
    if isinstance(by_mean, str):
        with pytest.raises(ValueError, match=f"outcome_B {by_mean}; .*mean outcome"):
            of_one_prompt(maxrl, rewards)
        return
    assert of_one_prompt(maxrl, rewards) == pytest.approx(by_mean, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "low", "half"),
    [
        ([1.0, 0.0, 0.0], [1.0, -0.25, -0.25], [2 / 3**0.5, -0.5 / 3**0.5, -0.5 / 3**0.5]),
        ([1.0, 1.0], [0.5, 0.5], [0.0, 0.0]),
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
        ([1.0], [0.0], [0.0]),
    ],
)
def test_baselines_below_the_mean(rewards, low, half):
    assert of_one_prompt(low_baseline, rewards) == pytest.approx(low, abs=1e-12)
    assert of_one_prompt(half_negative, rewards) == pytest.approx(half, abs=1e-5)


def test_shares_of_the_baseline():
    rewards = [1.0, 0.25, 0.0, 0.25]
    assert of_one_prompt(low_baseline, rewards, share=1.0) == of_one_prompt(rloo, rewards)
    assert of_one_prompt(low_baseline, rewards, share=0.0) == rewards
    with pytest.raises(ValueError, match=r"share=1.5: expected a number at least 0 and at most 1"):
        of_one_prompt(low_baseline, rewards, share=1.5)


@each_seed
def test_both_agree_with_a_loop_over_prompts(seed):
    outcome_B, group_B, valid_B = batch(seed)
    got = maxrl(outcome_B, group_B, row_valid_B=valid_B)
    assert got.tolist() == pytest.approx(loop_maxrl(outcome_B.tolist(), group_B, valid_B), abs=1e-12)
    ones_B = torch.ones_like(group_B)
    counts_B = torch.randint(1, 9, outcome_B.shape, generator=torch.Generator().manual_seed(seed))
    for weight_B, given_B in ((ones_B, None), (ones_B, ones_B), (counts_B, counts_B)):
        got = reinforce_pp(outcome_B, group_B, row_valid_B=valid_B, row_weight_B=given_B)
        want = loop_reinforce_pp(outcome_B.tolist(), group_B, valid_B, weight_B.tolist())
        assert got.tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("difference, advantage", [(1e-9, 5e-6), (3e-8, 1.5e-4), (2e-4, 2**-0.5), (2.0, 1.0)])
def test_reinforce_pp_does_not_make_advantages_of_noise(difference, advantage):
    """verl's floor: a std of 1e-4."""
    outcome_B = torch.tensor([difference, 0.0], dtype=torch.float64)
    assert reinforce_pp(outcome_B, torch.zeros(2).long()).tolist() == pytest.approx(
        [advantage, -advantage], rel=1e-6
    )


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e-2, 1.0])
def test_reinforce_pp_is_verl_s_at_any_scale(scale):
    """verl 0.9.1 whitens the centred outcomes over tokens, with Bessel's correction of their number."""
    from verl.trainer.ppo.core_algos import compute_reinforce_plus_plus_baseline_outcome_advantage as verls

    draw = torch.Generator().manual_seed(7)
    outcome_B = torch.rand(12, generator=draw, dtype=torch.float64) * scale
    group_B, length_B = torch.arange(12) // 4, torch.randint(1, 9, (12,), generator=draw)
    mask_B_T = (torch.arange(9) < length_B[:, None]).double()
    rewards_B_T = torch.zeros(12, 9, dtype=torch.float64).scatter(
        1, length_B[:, None] - 1, outcome_B[:, None]
    )
    theirs_B_T, _ = verls(rewards_B_T, mask_B_T, group_B.numpy())
    ours_B = reinforce_pp(outcome_B, group_B, row_weight_B=length_B)
    n = mask_B_T.sum().item()
    spread = (ours_B.double() ** 2 * length_B).sum() / n  # of whitened values: var / (var + eps)
    bessel = (1 + spread / (n - 1)).rsqrt()
    assert torch.allclose(theirs_B_T[:, 0], ours_B * bessel, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("operator", [maxrl, reinforce_pp])
def test_errors_say_which_row_and_what_would_be_right(operator):
    outcome_B, group_B = torch.tensor([1.0, NAN, 0.0]), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="outcome_B row 1 is nan; expected a finite outcome"):
        operator(outcome_B, group_B)
    with pytest.raises(ValueError, match=r"group_B has shape \(2,\); expected \(3,\)"):
        operator(outcome_B.nan_to_num(), group_B[:2])
    with pytest.raises(ValueError, match="row_weight_B row 2 is 0.0; expected positive numbers"):
        reinforce_pp(outcome_B.nan_to_num(), group_B, row_weight_B=torch.tensor([1.0, 2.0, 0.0]))


def double(rewards, params=None):
    """The centred reward, times params["scale"] (2)."""
    mean = sum(rewards) / len(rewards)
    return [(params or {}).get("scale", 2.0) * (reward - mean) for reward in rewards]


ACCEPTED = (
    (lambda rewards: double(rewards), 2.0),
    (lambda rewards, params: double(rewards, params), 3.0),
    (double, 3.0),
    (lambda rewards, knobs: double(rewards, knobs), 3.0),
    (lambda rewards, *, params: double(rewards, params), 3.0),
    (lambda: double, 3.0),
    (lambda rewards, scale=2.0: double(rewards, {"scale": scale}), 2.0),  # what has a default is left to it
    (lambda rewards, *more, **others: double(rewards), 2.0),
    (lambda rewards, params: torch.tensor(double(rewards, params)), 3.0),
)


@pytest.mark.parametrize(("function", "scale"), ACCEPTED)
def test_a_users_operator_in_every_accepted_shape(function, scale):
    outcome_B, group_B, valid_B = batch(3)
    operator = outcome_operator(function, "mine.f", {"scale": 3.0} if scale == 3.0 else None)
    got = operator(torch.where(valid_B, outcome_B, NAN), group_B, row_valid_B=valid_B)
    want = scale * grpo(outcome_B, group_B, norm_by_std=False, row_valid_B=valid_B)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


REFUSED = (
    (lambda rewards: rewards[1:], {}, "'mine.f' returned 1 values for rewards .*; expected a list of 2"),
    (lambda rewards: [NAN, 0.0], {}, "'mine.f' returned nan for rewards .*; expected a list of 2 finite"),
    (lambda rewards: 1.0, {}, "'mine.f' returned 1.0 for rewards .*; expected a list of 2"),
    (lambda rewards: None, {}, "'mine.f' returned None for rewards .*; expected a list of 2"),
    (lambda a, b, c: a, {}, r"takes \['a', 'b', 'c'\]; expected f\(rewards\) or f\(rewards, params\)"),
    (lambda rewards: rewards, {"k": 1}, "advantage_params={'k': 1} were given, .*'mine.f' takes none"),
    ([1.0], {}, "advantage_mode='mine.f' is a list; expected a function"),
)


@pytest.mark.parametrize(("function", "params", "message"), REFUSED)
def test_a_users_operator_that_does_not_fit(function, params, message):
    with pytest.raises(ValueError, match=message):
        outcome_operator(function, "mine.f", params)(torch.tensor([0.0, 1.0]), torch.tensor([3, 3]))


GAIN = torch.tensor([[0.4, 0.2], [-0.1, 0.1], [0.3, 0.0], [0.2, 0.5], [0.1, 0.1]])
HAS_GAIN = torch.tensor([[True, True], [True, True], [True, False], [True, True], [True, True]])
OUTCOME, PROMPT = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]), torch.tensor([9, 9, 4, 4, 2])


def credit(mode="none", outcome_B=OUTCOME, group_B=PROMPT, **options):
    return turn_credit(outcome_B, GAIN, HAS_GAIN, group_B, info_gain_norm_mode=mode, **options)


@pytest.mark.parametrize("mode", ["none", "separate", "turn-group-v1d", "turn-group-unbiased"])
@pytest.mark.parametrize("name", ["maxrl", "reinforce_pp", "callable"])
def test_turn_credit_adds_the_operators_advantage_to_that_of_the_gains(mode, name):
    operator = {"maxrl": maxrl, "reinforce_pp": reinforce_pp}.get(name) or outcome_operator(double, "f")
    got = credit(mode, outcome_operator=operator if name == "callable" else name)
    gains_alone = credit(mode, outcome_operator=lambda outcome_B, _, row_valid_B: 0 * outcome_B)
    difference_B_K1 = got.advantage_B_K1 - gains_alone.advantage_B_K1
    want_B_K1 = operator(OUTCOME, PROMPT)[:, None].expand(5, 3)
    torch.testing.assert_close(difference_B_K1, want_B_K1, rtol=0, atol=1e-6)
    assert torch.equal(got.clip_scale_B_K, gains_alone.clip_scale_B_K)


def test_a_users_operator_is_given_a_prompts_rows_that_count_in_row_order():
    outcome_B, group_B = torch.tensor([5.0, 1.0, 2.0, NAN, 3.0]), torch.tensor([4, -1, 4, 4, -1])
    valid_B, seen = torch.tensor([True, True, True, True, False]), []
    operator = outcome_operator(lambda rewards: seen.append(rewards) or rewards, "mine.f")
    got = credit("none", outcome_B, group_B, outcome_operator=operator, row_valid_B=valid_B)
    assert seen == [[5.0, 2.0], [1.0]]
    assert got.outcome_advantage_B.tolist() == [5.0, 1.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", NO_TABLES)
def test_tied_prompts_are_kept_or_skipped(mode):
    """Prompt 9 ties, prompt 2 has one row, which is no tie."""
    kept, skipped = credit(mode, tied_groups="keep"), credit(mode, tied_groups="skip")
    assert (skipped.advantage_B_K1[:2] == 0).all() and (skipped.clip_scale_B_K1[:2] == 1).all()
    assert torch.equal(skipped.advantage_B_K1[2:], kept.advantage_B_K1[2:])
    assert torch.equal(skipped.clip_scale_B_K1[2:], kept.clip_scale_B_K1[2:])
    assert (kept.advantage_B_K[:2] == 0).all() == (mode == "none")  # elsewhere the gains act on
    assert (kept.counts.pop("skipped_rows"), skipped.counts.pop("skipped_rows")) == (0, 2)
    assert kept.counts == skipped.counts
    assert kept.counts["tied_groups"] == kept.counts["singleton_groups"] == 1


def test_a_tie_is_one_among_rows_that_count():
    """A row whose outcome is not finite, and one that is not valid, neither make nor break a tie."""
    outcome_B, prompt_B = torch.tensor([1.0, 1.0, NAN, 1.0, 0.0]), torch.tensor([9, 9, 9, 4, 9])
    valid_B = torch.tensor([True, True, True, True, False])
    got = credit("turn-group-v1d", outcome_B, prompt_B, row_valid_B=valid_B, tied_groups="skip")
    assert (got.counts["skipped_rows"], got.counts["nonfinite_outcomes"]) == (2, 1)
    assert (got.advantage_B_K1[:2] == 0).all()
