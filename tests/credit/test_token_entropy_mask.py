"""Credit for the most uncertain tokens of a prompt, and the statistics of execution and planning tokens."""

import math

import pytest
import torch

from verl_credit.credit.token.gtpo import entropy_mask
from verl_credit.credit.token.token_credit import row_moments, token_stats

NAN = math.nan


def batch(seed=0, rows=10, tokens=12, dtype=torch.float64):
    """Uncertainties with many ties, observations in between, prompts of unequal size; row 0 without a token."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randint(0, 9, (rows, tokens), generator=generator) / 4
    mask, planning = (torch.rand(2, rows, tokens, generator=generator) < 0.6).unbind()
    mask[0] = False
    group = torch.randint(0, 4, (rows,), generator=generator) * 7 - 3
    return h.to(dtype), planning, mask, group


@pytest.mark.parametrize(
    ("rho", "kept"),
    [
        (0.05, [0, 0, 0, 0, 1]),  # never fewer than one
        (0.2, [0, 0, 0, 0, 1]),
        (0.39, [0, 0, 0, 0, 1]),  # int(5 * 0.39) = 1
        (0.4, [0, 1, 1, 0, 1]),  # the second largest, and its tie
        (0.8, [1, 1, 1, 0, 1]),
        (1.0, [1, 1, 1, 1, 1]),
        (0.0, [1, 1, 1, 1, 1]),
    ],
)
def test_ranks_and_ties(rho, kept):
    h = torch.tensor([[2.0, 3.0, 3.0, 1.0, 5.0]])
    assert entropy_mask(h, torch.ones(1, 5), torch.tensor([0]), rho=rho)[0].tolist() == kept


def test_a_share_is_counted_as_python_counts_it():
    """int(100 * 0.29) is 28, for 100 * 0.29 is 28.999...; float32 arithmetic would keep 29."""
    h = torch.arange(100.0).view(4, 25)
    assert entropy_mask(h, h >= 0, torch.zeros(4).long(), rho=0.29).sum() == int(100 * 0.29) == 28


def test_nothing_to_rank():
    h, planning, mask, group = batch()
    assert not entropy_mask(h, mask & False, group, rho=0.2).any()
    assert entropy_mask(h[:0], mask[:0], group[:0], rho=0.2).shape == (0, 12)
    assert entropy_mask(h[:, :0], mask[:, :0], group, rho=0.2).shape == (10, 0)
    assert set(token_stats(h, planning, mask & False).values()) == {0.0}
    assert set(token_stats(h[:0], planning[:0], mask[:0]).values()) == {0.0}


def test_stats_hold_a_small_spread_on_a_large_mean():
    h = 1e6 + torch.tensor([[0.0, 0.001]], dtype=torch.float64).repeat(50, 1)
    stats = token_stats(h, None, h > 0)
    assert stats["exec_entropy_var"] == pytest.approx(2.5e-7, rel=1e-5)


def test_stats_ignore_what_is_outside_the_mask():
    h, planning, mask, _ = batch()
    dirty = torch.where(mask, h, NAN)
    assert token_stats(dirty, planning | ~mask, mask) == token_stats(h, planning, mask)


def test_arguments():
    h, _, mask, group = batch()
    for rho in (NAN, math.inf):
        with pytest.raises(ValueError, match=f"rho={rho}; expected a share from 0 to 1"):
            entropy_mask(h, mask, group, rho=rho)
    with pytest.raises(ValueError, match=r"mask_B_T has shape \(10, 11\); expected \(10, 12\)"):
        entropy_mask(h, mask[:, 1:], group, rho=0.2)
    with pytest.raises(ValueError, match=r"group_B has shape \(9,\); expected \(10,\)"):
        entropy_mask(h, mask, group[1:], rho=0.2)
    with pytest.raises(TypeError, match=r"group_B has dtype torch.float32; group ids are integers"):
        entropy_mask(h, mask, group.float(), rho=0.2)
    with pytest.raises(ValueError, match="mask_B_T is not a mask: row 1"):
        entropy_mask(h, mask.long() * 2, group, rho=0.2)


def test_statistics_stay_on_the_device_of_their_tokens():
    h, mask = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.bool, device="meta")
    assert row_moments(h, mask, mask).device.type == "meta"
