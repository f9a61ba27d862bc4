"""Tables of tokens are walked a few rows at a time: the size of the pieces changes no number and no message."""

import math

import pytest
import torch

from verl_credit.credit import groups as chunks
from verl_credit.credit import gtpo_canonical, spread
from verl_credit.credit.token.token_credit import token_credit, token_stats
from verl_credit.credit.token.token_transforms import TRANSFORMS

ROWS, WIDTH = 11, 6
each_size = pytest.mark.parametrize("size", [1, 2 * WIDTH, 4 * WIDTH + 3])


def batch(seed=0):
    random = torch.Generator().manual_seed(seed)
    draw = torch.rand(4, ROWS, WIDTH, generator=random, dtype=torch.float64)
    group_B = torch.randint(0, 3, (ROWS,), generator=random)
    return draw[0] - 0.5, draw[1] < 0.7, draw[2] * 3, draw[3] < 0.3, group_B


@each_size
@pytest.mark.parametrize("mode", TRANSFORMS)
def test_token_credit(monkeypatch, mode, size):
    advantage, mask, h, planning, group = batch()
    given = dict(
        uncertainty_B_T=h, planning_B_T=planning, group_B=group, transform_mode=mode, sepa_lambda=0.4
    )
    whole = token_credit(advantage, mask, **given)
    monkeypatch.setattr(chunks, "CACHED_TOKENS", size)
    pieces = token_credit(advantage, mask, **given)
    assert torch.equal(pieces.advantage_B_T, whole.advantage_B_T)
    assert torch.equal(pieces.weight_B_T, whole.weight_B_T)
    assert pieces.stats == pytest.approx(whole.stats, rel=1e-13)


@each_size
def test_statistics_entropies_and_turns(monkeypatch, size):
    advantage, mask, h, planning, group = batch(1)
    outcome_B, ids_B_T = (torch.arange(ROWS) % 2).double(), torch.arange(WIDTH).expand(ROWS, WIDTH)

    def all_of_them():
        stats_6 = torch.tensor(list(token_stats(h, planning, mask).values()))
        return stats_6, gtpo_canonical(outcome_B, h, mask, group), spread(advantage, ids_B_T, mask)

    whole = all_of_them()
    monkeypatch.setattr(chunks, "CACHED_TOKENS", size)
    for ours, expected in zip(all_of_them(), whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)


def test_a_message_names_the_row_of_the_batch_and_not_of_the_piece(monkeypatch):
    monkeypatch.setattr(chunks, "CACHED_TOKENS", 2 * WIDTH)
    ones = torch.ones(ROWS, WIDTH)
    bad = ones.clone()
    bad[7, 3] = math.inf
    with pytest.raises(ValueError, match="uncertainty_B_T row 7 is not finite on a policy token"):
        token_credit(ones, ones, transform_mode="gtpo", uncertainty_B_T=bad)
    with pytest.raises(ValueError, match="entropy_B_T row 7 holds a value that is not an entropy"):
        gtpo_canonical(torch.ones(ROWS), bad, ones, torch.zeros(ROWS, dtype=torch.long))
    with pytest.raises(ValueError, match="turn_ids_B_T row 7 holds turn 2 on a policy token"):
        spread(torch.zeros(ROWS, 2), bad.where(bad < 2, 2).long(), ones)
