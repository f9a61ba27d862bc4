"""bipace: means of equal actions and of states, without the own trajectory, and beside GiGPO."""

from itertools import pairwise

import pytest
import torch

from kit.modes import batch
from verl_credit.credit import bipace, gigpo
from verl_credit.credit.turn.anchors import exact_anchors
from verl_credit.credit.turn.near_anchors import near_anchors


def steps(mode, given, more, **options):
    """The second term alone."""
    with_it, without = (
        mode(*given, **more, **options, **off).advantage_B_K1 for off in ({}, {"step_weight": 0.0})
    )
    return with_it - without


def drawn(seed: int, rows: int = 12, actions: int = 2):
    """Trajectories of two prompts through few states, so that they come to a state twice; outcomes of any size."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (rows,), generator=random).tolist()
    rewards = [torch.randn(n, generator=random).tolist() for n in lengths]
    outcomes, groups = torch.rand(rows, generator=random).tolist(), [row % 2 for row in range(rows)]
    states = [[0, *torch.randint(0, actions, (n,), generator=random).tolist()] for n in lengths]
    return batch(rewards, outcomes, groups), states, groups


def by_loops(given, more, anchor_B_K1, groups, means):
    """Q - V in Python's floats, visit by visit."""
    lengths, (outcome_B, reward_B_K) = more["n_tool_turns_B"].tolist(), given[:2]
    earned, visits = {}, []
    for row, n in enumerate(lengths):
        rewards = [*reward_B_K[row, :n].tolist(), float(outcome_B[row])]
        for k in range(n + 1):
            ends = k == n
            visits.append(
                (row, k, anchor_B_K1[row, k].item(), None if ends else anchor_B_K1[row, k + 1].item())
            )
            earned[row, k] = sum(rewards[k:])
    found = torch.zeros(len(lengths), anchor_B_K1.shape[1], dtype=torch.float64)
    for row, k, state, led_to in visits:
        here = [one for one in visits if groups[one[0]] == groups[row] and one[2] == state]
        here = here if means == "all" else [one for one in here if one[0] != row]
        alike = [one for one in here if one[3] == led_to and led_to is not None]
        if here:
            value = sum(earned[one[:2]] for one in here) / len(here)
            action = sum(earned[one[:2]] for one in alike) / len(alike) if alike else earned[row, k]
            found[row, k] = action - value
    return found


@pytest.mark.parametrize("means", ["others", "all"])
def test_the_second_term_is_that_of_plain_loops(means):
    for seed in range(6):
        (given, more), states, groups = drawn(seed)
        anchor_B_K1 = exact_anchors(states, groups)
        own = torch.arange(anchor_B_K1.shape[1]) <= more["n_tool_turns_B"][:, None]
        found = steps(bipace, given, more, anchor_B_K1=anchor_B_K1, means=means)
        expected = by_loops(given, more, anchor_B_K1, groups, means)
        torch.testing.assert_close(found[own].double(), expected[own], atol=2e-6, rtol=1e-5)


def test_the_means_of_others_never_hold_the_own_outcome():
    """All that a better outcome of a trajectory does to its own second terms comes from actions that nobody else took."""
    taken_by_others = 0
    for seed in range(6):
        (given, more), states, groups = drawn(seed)
        given = [given[0].double(), given[1].double(), *given[2:]]
        options = {"anchor_B_K1": exact_anchors(states, groups)}
        before = steps(bipace, given, more, **options)
        for row, visited in enumerate(states):
            outcome_B = given[0].clone()
            outcome_B[row] += 1
            moved = (steps(bipace, [outcome_B, *given[1:]], more, **options) - before)[row, : len(visited)]
            pairs = list(zip(visited, [*visited[1:], None], strict=True))
            for k, (state, led_to) in enumerate(pairs):
                others = [
                    one for other, one in enumerate(states) if other != row and groups[other] == groups[row]
                ]
                known = any(state in one for one in others)
                taken = any((state, led_to) in pairwise(one) for one in others)
                taken_by_others += taken
                assert moved[k].item() == pytest.approx(float(known and not taken), abs=1e-12)
    assert taken_by_others > 20


def test_at_distance_0_it_is_gigpo_where_every_action_leads_elsewhere():
    """means=all is GiGPO's second term there; means of others are n / (n - 1) times that, with n visits of a state."""
    given, more = batch([[0.0], [0.0], [0.0]], [1.0, 0.0, 0.5])
    vector_S_D = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    state_B_K1_D = vector_S_D[torch.tensor([[0, 1], [0, 2], [0, 3]])]
    near = near_anchors(state_B_K1_D, [0] * 3, distance=0.0, row_key_B=range(3))
    exact = exact_anchors([["q", "a"], ["q", "b"], ["q", "c"]], [0] * 3)
    theirs = steps(gigpo, given, more, anchor_B_K1=exact)
    assert theirs[:, 0].tolist() == [0.5, -0.5, 0.0]
    torch.testing.assert_close(steps(bipace, given, more, anchor_B_K1=near, means="all"), theirs)
    torch.testing.assert_close(steps(bipace, given, more, anchor_B_K1=near), theirs * 1.5)
    wide = near_anchors(state_B_K1_D, [0] * 3, distance=0.99, row_key_B=range(3))
    assert not torch.allclose(steps(bipace, given, more, anchor_B_K1=wide), theirs)


def test_worked():
    """Three trajectories leave state 0, two of them for state 1: each reads the other's outcome there."""
    given, more = batch([[None], [None], [None]], [1.0, 0.0, 0.0])
    anchors = torch.tensor([[0, 1], [0, 1], [0, 2]])
    found = steps(bipace, given, more, anchor_B_K1=anchors)
    # V of the others: 0, 1/2, 1/2. Q: 0, 1, and the third one's own 0. Answers: 1 - 0 and 0 - 1. State 2 is alone.
    expected = torch.tensor([[0 - 0, 1.0 - 0], [1 - 0.5, 0 - 1], [0 - 0.5, 0]])
    torch.testing.assert_close(found, expected.to(found.dtype))
