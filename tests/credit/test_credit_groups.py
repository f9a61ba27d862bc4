"""Group statistics, GRPO and the group counts."""

import math

import pytest
import torch

from verl_credit.credit import group_counts, group_stats, grpo, reinforce_pp, z_score


def test_statistics_of_a_known_group():
    values = torch.tensor([1.0, 5.0, 3.0, 100.0])
    stats = group_stats(values, torch.tensor([2, 2, 2, -9]), variance_floor=0.0)
    assert stats.mean_N.tolist() == [3, 3, 3, 100]
    assert stats.std_N.tolist() == pytest.approx([math.sqrt(8 / 3)] * 3 + [1])
    assert stats.count_N.tolist() == [3, 3, 3, 1]
    assert stats.deviation_N.tolist() == [-2, 2, 0, 0]
    assert stats.std_N.dtype == torch.float64


def test_ddof_floor_and_eps():
    values, group = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([0, 0])
    assert group_stats(values, group, ddof=1, variance_floor=0.0).std_N[0].item() == pytest.approx(
        math.sqrt(2)
    )
    assert group_stats(values, group, ddof=0, variance_floor=3.0).std_N[0].item() == pytest.approx(2)
    assert z_score(values, group, variance_floor=0.0, eps=1.0).tolist() == [-0.5, 0.5]
    assert z_score(values, group, norm_by_std=False).tolist() == [-1, 1]


def test_members_only():
    values = torch.tensor([1.0, 3.0, float("nan"), float("inf")])
    member = torch.tensor([True, True, False, False])
    z = z_score(values, torch.tensor([0, 0, 0, 1]), member_N=member, variance_floor=0.0, eps=0.0)
    assert z.tolist() == [-1, 1, 0, 0]
    assert group_stats(values, torch.tensor([0, 0, 0, 1]), member_N=member).count_N.tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-6])
def test_equal_values_give_exactly_zero_whatever_eps_is(eps):
    """0 / 0 without an eps; 0.1 has no exact binary value, so a mean of plain sums would leave a residue."""
    values, group = torch.full((7,), 0.1, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 0, 0, 1])
    for tied in (
        z_score(values, group, variance_floor=0.0, eps=eps),
        z_score(values, group, ddof=1, variance_floor=0.0, eps=eps),
        grpo(values, group, eps=eps),
        reinforce_pp(values, group, eps=eps),
    ):
        assert tied.tolist() == [0.0] * 7
    mixed = grpo(torch.tensor([1.0, 0.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1]), ddof=0, eps=eps)
    assert mixed.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], rel=1e-5)


def test_an_outlier_does_not_disturb_another_group():
    """Sums never run across groups, so a huge value elsewhere costs no digits here."""
    values = torch.tensor([1e-3, 3e-3, 1e15, -1e15], dtype=torch.float64)
    z = z_score(values, torch.tensor([0, 0, 1, 1]), variance_floor=0.0, eps=0.0)
    assert z.tolist() == pytest.approx([-1, 1, 1, -1])


def test_a_large_common_offset_costs_no_digits():
    values = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    group = torch.zeros(3, dtype=torch.long)
    assert torch.equal(z_score(values + 2.0**45, group), z_score(values, group))


def test_grpo_by_hand():
    outcome, group = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([5, 5, 5, 5])
    assert grpo(outcome, group, norm_by_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert grpo(outcome, group, norm_by_std=True).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert grpo(outcome, group, ddof=0).tolist() == pytest.approx([3**0.5] + [-(3**-0.5)] * 3, abs=1e-5)


def test_a_group_of_one():
    outcome, group = torch.tensor([0.7, 1.0, 0.0]), torch.tensor([0, 1, 1])
    assert grpo(outcome, group)[0] == 0
    assert grpo(outcome, group, norm_by_std=False)[0] == 0
    assert grpo(outcome, group, singleton="raw")[0].item() == pytest.approx(0.7, abs=1e-6)
    assert torch.equal(grpo(outcome, group, singleton="raw")[1:], grpo(outcome, group)[1:])
    valid = torch.tensor([True, True, False])
    assert grpo(outcome, group, row_valid_B=valid).tolist() == [0, 0, 0]  # one valid row: a group of one


def test_counts():
    outcome = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, float("nan"), 1.0])
    group = torch.tensor([10, 10, 20, 20, 30, 30, 40, 50, 50])
    valid = torch.tensor([True] * 8 + [False])
    assert group_counts(outcome, group, row_valid_B=valid, group_size=2) == {
        "groups": 4,  # 50 has no usable row left
        "singleton_groups": 1,
        "tied_groups": 2,
        "all_solved_groups": 1,
        "all_failed_groups": 1,
        "short_groups": 2,
    }
