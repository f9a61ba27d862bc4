"""The probe inside training, without training: how many prompts it may take, its groups, its prediction."""

import itertools

import pytest
import torch

from verl_credit.credit.entropy_change import predicted_change
from verl_credit.host.step.probe_rows import deal, group_prompts, prompts_within


def test_the_first_measurement_takes_one_prompt_a_group():
    assert prompts_within(0.1, 4, 64, step_s=100.0, prompt_s=None) == 4
    assert prompts_within(0.1, 4, 64, step_s=None, prompt_s=None) == 4


def test_prompts_by_hand():
    # 0.2 of the whole step: 25 s beside 100 s. 3 s a prompt: 8 of them take 24 s, and the next group 36 s.
    assert prompts_within(0.2, 4, 64, step_s=100.0, prompt_s=3.0) == 8
    assert prompts_within(0.2, 5, 64, step_s=100.0, prompt_s=3.0) == 5
    assert prompts_within(1.0, 4, 63, step_s=100.0, prompt_s=3.0) == 60


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("groups, available", [(2, 5), (4, 64), (7, 100)])
def test_within_the_share_or_the_least(share, groups, available):
    for step_s, prompt_s in itertools.product((1.0, 300.0), (0.01, 1.0, 50.0)):
        n = prompts_within(share, groups, available, step_s, prompt_s)
        took = n * prompt_s
        assert n % groups == 0 and groups <= n <= available
        assert n == groups or took / (step_s + took) <= share
        more = (n + groups) * prompt_s
        assert n + groups > available or n == groups or more / (step_s + more) > share


def test_fewer_prompts_than_groups_are_none():
    assert prompts_within(0.1, 4, 3, step_s=100.0, prompt_s=None) == 0


def test_a_group_has_whole_prompts_and_none_that_was_not_chosen():
    prompt_B = torch.tensor([3, 0, 1, 0, 2, 4, 1, 3])
    assert group_prompts(prompt_B, [0, 1, 2, 3], 2) == [[1, 3, 4], [0, 2, 6, 7]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 4])
def test_ranks_get_equal_parts_of_every_group_and_each_row_counts_once(ranks, micro):
    rows_G = [[5, 1, 7], [2, 0, 3, 9, 8]]
    dealt = deal(rows_G, ranks, micro)
    assert sorted(row for row, _, counts in dealt if counts) == sorted([*rows_G[0], *rows_G[1]])
    assert all(row in rows_G[group] for row, group, _ in dealt)
    share = len(dealt) // ranks
    parts = [[group for _, group, _ in dealt[r * share : (r + 1) * share]] for r in range(ranks)]
    for group in range(2):
        numbers = {part.count(group) for part in parts}
        assert len(numbers) == 1 and numbers.pop() % micro == 0
    assert len(dealt) - 8 < 2 * ranks * micro


def test_prediction_by_hand():
    # 6 over 4 tokens; rests (0.5, -0.5), squares 0.5, times 2 / 1, root 1, over 4.
    value, error = predicted_change(torch.tensor([2.0, 4.0]).double(), torch.tensor([1.0, 3.0]).double())
    assert (value, error) == (1.5, 0.25)
