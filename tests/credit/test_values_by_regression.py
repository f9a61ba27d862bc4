"""Values by regression: against numpy's least squares, and what no value may know."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from verl_credit.credit import turn_gae
from verl_credit.credit.turn.values import (
    States,
    connected,
    crossfit,
    explained_variance,
    explained_variance_of_changes,
    group_features,
    loo_mean,
    ridge,
    state_features,
)

NAN = float("nan")


def drawn(seed=0, prompts=6, rows=4, turns=3, hidden=2):
    """(states, row_N, outcome_B, group_B): every row has all turns; outcomes follow the second of two drawn features."""
    draw = torch.Generator().manual_seed(seed)
    group_B = torch.arange(prompts).repeat_interleave(rows)
    observed_B_K_D = torch.randn(len(group_B), turns, hidden, generator=draw, dtype=torch.float64)
    chance_B = observed_B_K_D[:, -1, 1].sigmoid()
    outcome_B = (torch.rand(len(group_B), generator=draw, dtype=torch.float64) < chance_B).double()
    return observed_B_K_D, outcome_B, group_B


def states_of(observed_B_K_D, outcome_B, group_B, prompt_B=None):
    """The states of the batch, flattened, and the mean that each state's row reads."""
    rows, turns, _ = observed_B_K_D.shape
    mean_B = loo_mean(outcome_B, group_B, torch.ones(rows, dtype=torch.bool))
    x_B_K_D = torch.cat([group_features(mean_B, turns), observed_B_K_D], dim=2)
    prompt_B = group_B * 7 + 3 if prompt_B is None else prompt_B
    each = (x_B_K_D.flatten(0, 1), outcome_B.repeat_interleave(turns), prompt_B.repeat_interleave(turns))
    return States(*each), mean_B.repeat_interleave(turns)


def fitted(batch, replay=None, *, folds=3, prompt_B=None):
    states, mean_N = states_of(*batch, prompt_B)
    value_N, n = crossfit(states, replay, mean_N, shrink=0.03, folds=folds)
    return value_N.view(batch[0].shape[:2]), n


def test_the_mean_of_the_others_leaves_out_the_own_outcome():
    outcome_B, group_B = torch.tensor([1.0, 0, 0, 1, 0.5, NAN]), torch.tensor([4, 4, 4, 9, 2, 9])
    valid_B = torch.tensor([True, True, True, True, True, False])
    wanted = torch.tensor([0.0, 0.5, 0.5, NAN, NAN, NAN], dtype=torch.float64)
    torch.testing.assert_close(loo_mean(outcome_B, group_B, valid_B), wanted, equal_nan=True, rtol=0, atol=0)


def test_the_mean_of_the_others_leaves_out_what_is_not_known():
    return_B, group_B = torch.tensor([1.0, NAN, 0.5, NAN]), torch.tensor([4, 4, 4, 9])
    wanted = torch.tensor([0.5, 0.75, 1.0, NAN], dtype=torch.float64)
    found = loo_mean(return_B, group_B, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)


def test_rows_are_connected_by_prompts_and_by_groups():
    prompt_B, group_B = torch.tensor([7, 3, 3, 9, 5, 8]), torch.tensor([0, 0, 1, 1, 2, 3])
    assert connected(prompt_B, group_B).tolist() == [3, 3, 3, 3, 5, 8]
    assert connected(prompt_B[:0], group_B[:0]).tolist() == []


@pytest.mark.parametrize("far", [50.0, 1e4])
def test_a_state_that_is_far_off_has_a_value_among_the_returns_and_hides_no_other(far):
    draw = torch.Generator().manual_seed(0)
    x_N_D = torch.randn(200, 4, generator=draw, dtype=torch.float64)
    y_N = (torch.rand(200, generator=draw, dtype=torch.float64) < (3 * x_N_D[:, 0]).sigmoid()).double()
    states, mean_N = States(x_N_D, y_N, torch.arange(200) // 4), torch.zeros(200, dtype=torch.float64)
    usual, _ = crossfit(states, None, mean_N, shrink=0.03, folds=8)
    spoiled = replace(
        states, x_N_D=x_N_D.index_put((torch.tensor(17), torch.tensor(0)), torch.tensor(far).double())
    )
    value, _ = crossfit(spoiled, None, mean_N, shrink=0.03, folds=8)
    assert value.min() >= 0 and value.max() <= 1 and usual.min() >= 0 and usual.max() <= 1
    others = torch.arange(200) != 17
    clean, hidden = (explained_variance(one[others], y_N[others]) for one in (usual, value))
    assert clean > 0.45 and abs(hidden - clean) < 0.03


def test_a_rare_feature_is_no_outlier():
    """1 in 2 of 400 states: its middle 98 % are all equal, and it says the return all the same."""
    x_N_D, y_N = torch.zeros(400, 1, dtype=torch.float64), torch.zeros(400, dtype=torch.float64)
    x_N_D[:2], y_N[:2] = 1.0, 1.0
    predict = ridge(States(x_N_D, y_N, torch.arange(400)), 1e-3)
    assert predict(x_N_D)[:2].min() > 0.3


def test_what_others_returned_from_a_state():
    """States 7 and 8 of a group of three rows, and one of another group; -1 is no state. m is .5, .25 and .25."""
    anchor_B_K1 = torch.tensor([[7, 8, 7], [7, 8, -1], [7, 7, 9], [7, -1, -1]])
    return_B_K1 = torch.tensor([[1.0, 2, 3], [0, 4, 0], [6, NAN, 5], [1, 1, 1]]).double()
    turn_B_K1 = torch.tensor([[True] * 3, [True, True, False], [True] * 3, [True, False, False]])
    group_B, mean_B = torch.tensor([0, 0, 0, 1]), torch.tensor([0.5, 0.25, 0.25, NAN]).double()
    found = state_features(anchor_B_K1, return_B_K1, turn_B_K1, group_B, mean_B)
    first = [(0 + 6 + 0.5) / 3, 2, (0 + 6 + 0.5) / 3, 0, 0]
    again = [*first[:3], 1, 1]
    assert found[0].tolist() == [first, [(4 + 0.5) / 2, 1, (4 + 0.5) / 2, 0, 0], again]
    assert found[1, :2].tolist() == [
        [(1 + 6 + 0.25) / 3, 2, (1 + 6 + 0.25) / 3, 0, 0],
        [1.125, 1, 1.125, 0, 0],
    ]
    assert found[1, 2].isnan().all()
    alone = [0.25, 0, 0, 0, 0]
    assert found[2].tolist() == [
        [(1 + 0 + 0.25) / 3, 2, (1 + 0 + 0.25) / 3, 0, 0],
        [*found[2, 0, :3].tolist(), 1, 1],
        alone,
    ]
    assert found[3, 0, :1].isnan().all() and found[3, 0, [1, 3, 4]].tolist() == [0, 0, 0]


def test_a_lost_return_from_a_state_counts_for_nobody():
    anchor_B_K1, group_B = torch.tensor([[7], [7], [7]]), torch.zeros(3, dtype=torch.long)
    return_B_K1, turn_B_K1 = torch.tensor([[NAN], [1.0], [0.0]]).double(), torch.ones(3, 1, dtype=torch.bool)
    found = state_features(
        anchor_B_K1, return_B_K1, turn_B_K1, group_B, torch.tensor([0.5, 0.0, 1.0]).double()
    )
    assert found[:, 0, :2].tolist() == [[(1 + 0 + 0.5) / 3, 2], [0, 1], [1, 1]]


def test_the_features_of_the_group():
    x_B_K1_D = group_features(torch.tensor([0.25, NAN], dtype=torch.float64), 5)
    assert x_B_K1_D[0, 0].tolist() == [0.25] + [0] * 11
    assert x_B_K1_D[0, 2].tolist() == [0.25, 0.25, 0.25, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert x_B_K1_D[0, 4].tolist() == [0.25] * 4 + [1] * 4 + [0] * 4
    assert x_B_K1_D[1, 1].isnan().tolist() == [True, True] + [False] * 10


def test_ridge_against_least_squares_with_rows_for_the_penalty():
    draw = np.random.default_rng(0)
    x, shrink = draw.normal(size=(40, 3)) * [1, 10, 0.1] + 5, 0.2
    y = x @ [1.0, -0.1, 3] + draw.normal(size=40)
    z = (x - x.mean(0)) / x.std(0)
    rows = np.vstack([z, np.sqrt(shrink * 40) * np.eye(3)])
    w = np.linalg.lstsq(rows, np.concatenate([y - y.mean(), np.zeros(3)]), rcond=None)[0]
    predict = ridge(States(torch.tensor(x), torch.tensor(y), torch.zeros(40)), shrink)
    torch.testing.assert_close(predict(torch.tensor(x)), torch.tensor(z @ w + y.mean()))


def test_ridge_without_spread_and_without_values_is_the_mean():
    x_N_D = torch.tensor([[0.1, NAN], [0.1, NAN], [0.1, NAN]], dtype=torch.float64)
    predict = ridge(States(x_N_D, torch.tensor([0.0, 1, 1]).double(), torch.zeros(3)), 0.03)
    elsewhere = torch.tensor([[5.0, 5.0], [NAN, NAN]], dtype=torch.float64)
    assert predict(elsewhere).tolist() == pytest.approx([2 / 3, 2 / 3])
    with pytest.raises(ValueError, match="shrink=0: expected a number above 0"):
        ridge(States(x_N_D, torch.zeros(3), torch.zeros(3)), 0)


@pytest.mark.parametrize("rows, prompts", [(4, 6), (2, 6), (1, 6), (3, 1), (1, 1), (2, 2)])
def test_a_value_does_not_change_when_the_own_outcome_does(rows, prompts):
    observed_B_K_D, outcome_B, group_B = drawn(rows=rows, prompts=prompts)
    replay, _ = states_of(*drawn(seed=1))
    for before in (None, replay):
        usual, _ = fitted((observed_B_K_D, outcome_B, group_B), before)
        assert usual.isfinite().all()
        for row in range(len(outcome_B)):
            other_B = outcome_B.clone()
            other_B[row] = 1e3 - other_B[row]
            changed, _ = fitted((observed_B_K_D, other_B, group_B), before)
            assert torch.equal(changed[row], usual[row])
            if prompts > 1 and rows > 1:
                assert not torch.equal(changed, usual)


def test_the_order_of_the_rows_does_not_matter():
    observed_B_K_D, outcome_B, group_B = drawn()
    order = torch.randperm(len(outcome_B), generator=torch.Generator().manual_seed(2))
    shuffled, _ = fitted((observed_B_K_D[order], outcome_B[order], group_B[order]))
    usual, _ = fitted((observed_B_K_D, outcome_B, group_B))
    torch.testing.assert_close(shuffled, usual[order], rtol=0, atol=1e-12)


def test_each_fold_is_a_ridge_on_all_other_prompts_and_the_replay():
    batch, replay = drawn(), states_of(*drawn(seed=1), prompt_B=drawn()[2] * 7 + 10)[0]
    states, mean_N = states_of(*batch)
    value_N, n = crossfit(states, replay, mean_N, shrink=0.03, folds=100)
    assert n == len(states.return_N) + len(replay.return_N)
    for prompt in states.prompt_N.unique():
        fit = States.joined(one.at(one.prompt_N != prompt) for one in (states, replay))
        own_N = states.prompt_N == prompt
        torch.testing.assert_close(value_N[own_N], ridge(fit, 0.03)(states.x_N_D[own_N]))
    assert (
        replay.prompt_N[:, None] == states.prompt_N
    ).any()  # a prompt that came before is left out of its fold


def test_a_return_that_is_not_known_is_in_no_fit_and_gets_a_value():
    batch = drawn()
    states, mean_N = states_of(*batch)
    lost_N = torch.arange(len(mean_N)) % 5 == 0
    lost = replace(states, return_N=torch.where(lost_N, NAN, states.return_N))
    value_N, n = crossfit(lost, None, mean_N, shrink=0.03, folds=3)
    assert value_N.isfinite().all() and n == int((~lost_N).sum())


def test_one_prompt_reads_the_mean_of_the_others_and_a_step_without_variance_its_outcome():
    observed_B_K_D, outcome_B, group_B = drawn(prompts=1)
    value_B_K, _ = fitted((observed_B_K_D, outcome_B, group_B))
    mean_B = loo_mean(outcome_B, group_B, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(value_B_K, mean_B[:, None].expand(-1, 3))
    assert fitted(drawn(prompts=1, rows=1))[0].tolist() == [[0, 0, 0]]
    observed_B_K_D, outcome_B, group_B = drawn()
    value_B_K, _ = fitted((observed_B_K_D, torch.full_like(outcome_B, 0.25), group_B))
    torch.testing.assert_close(value_B_K, torch.full_like(value_B_K, 0.25))


def test_explained_variance():
    return_N = torch.tensor([0.0, 1, 1, 0, NAN]).double()
    assert explained_variance(return_N, return_N) == 1
    assert explained_variance(torch.full((5,), 0.5), return_N) == 0
    assert explained_variance(torch.tensor([0.5, 0.5, 0.5, 1.0, 9]), return_N) == pytest.approx(-0.75)
    assert explained_variance(return_N, torch.ones(5)) is None


def test_explained_variance_of_changes_compares_a_state_with_the_one_before():
    turn_B_K1 = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    return_B_K1 = torch.tensor([[1.0] * 3, [0, 0, NAN], [1, NAN, NAN]]).double()
    value_B_K1 = torch.tensor([[0.5, 0.75, 0.5], [0.5, 0.25, 0], [0, 0, 0]]).double()
    # errors before: .5, .25, -.5; after: .25, .5, -.25
    wanted = 1 - (0.0625 + 0.25 + 0.0625) / (0.25 + 0.0625 + 0.25)
    assert explained_variance_of_changes(value_B_K1, return_B_K1, turn_B_K1) == pytest.approx(wanted)
    discounted = explained_variance_of_changes(value_B_K1, return_B_K1, turn_B_K1, gamma=0.5)
    assert discounted == pytest.approx(1 - 0.5**2 * (1 - wanted))
    assert explained_variance_of_changes(value_B_K1[2:], return_B_K1[2:], turn_B_K1[2:]) is None


def test_explained_variance_of_changes_is_that_of_true_values_in_a_fair_game():
    """Two tosses; the outcome is 1 if both are heads: V is 1/4, then 1/2 or 0. E dV^2 = 1/16, E (G - V_0)^2 = 3/16."""
    value_B_K1 = torch.tensor([[0.25, 0.5], [0.25, 0.5], [0.25, 0], [0.25, 0]])
    return_B_K1 = torch.tensor([[1.0, 1], [0, 0], [0, 0], [0, 0]])
    every = torch.ones(4, 2, dtype=torch.bool)
    assert explained_variance_of_changes(value_B_K1, return_B_K1, every) == pytest.approx(1 / 3)
    assert explained_variance_of_changes(torch.full((4, 2), 0.25), return_B_K1, every) == 0


def gae(value_B_K1, **options):
    none = torch.zeros(2, 2, dtype=torch.bool)
    given = torch.tensor([1.0, 0]), torch.zeros(2, 2), none, torch.zeros(2, dtype=torch.long)
    turns = torch.tensor([2, 1])
    return turn_gae(*given, n_tool_turns_B=turns, value_B_K1=value_B_K1, **options).advantage_B_K1


def test_turn_gae_scales_then_weighs_what_is_below_0():
    value_B_K1 = torch.tensor([[0.5, 0.25, 0.5], [0.5, 0.25, NAN]]).double()
    raw = torch.tensor([[-0.25, 0.25, 0.5], [-0.25, -0.25, -0.25]]).double()
    torch.testing.assert_close(gae(value_B_K1, lam=0.0).double(), raw)
    rms = (raw.flatten()[:5].square().sum() / 5).sqrt()  # the second row has two turns
    scaled = raw / rms
    torch.testing.assert_close(gae(value_B_K1, lam=0.0, scale="rms").double(), scaled)
    halved = torch.where(scaled < 0, scaled / 2, scaled)
    torch.testing.assert_close(gae(value_B_K1, lam=0.0, scale="rms", negative=0.5).double(), halved)
    same = torch.tensor([[1.0, 1, 1], [0, 0, 0]]).double()
    assert not gae(same, scale="rms").any()


def test_small_advantages_are_not_made_full_size():
    """One state is off by .01, so that the rms is .0063: the floor of .1 makes ten times of it, no floor 158 times."""
    value_B_K1 = torch.tensor([[1.0, 0.99, 1.0], [0.0, 0.0, NAN]]).double()
    raw = torch.tensor([[-0.01, 0.01, 0.0], [0.0, 0.0, 0.0]]).double()
    torch.testing.assert_close(gae(value_B_K1, lam=0.0, scale="rms").double(), 10 * raw)
    whole = gae(value_B_K1, lam=0.0, scale="rms", rms_floor=0.0).double()
    torch.testing.assert_close(whole, raw / (2e-4 / 5) ** 0.5)
    with pytest.raises(ValueError, match="rms_floor=0.2 with scale='none'"):
        gae(value_B_K1, rms_floor=0.2)


def test_the_size_of_a_step_is_that_of_the_turns_whose_rewards_are_known():
    """The first row has lost the reward of its first turn: its other two turns and the second row's only turn count."""
    lost = torch.tensor([[NAN, 0.0], [0.0, 0.0]]), torch.tensor([[True, True], [False, False]])
    rows = torch.tensor([1.0, 0.0]), *lost, torch.zeros(2, dtype=torch.long)
    value_B_K1 = torch.tensor([[9.0, 0.5, 0.25], [0.25, 0, 0]]).double()
    turns = torch.tensor([2, 0])
    credit = turn_gae(*rows, n_tool_turns_B=turns, value_B_K1=value_B_K1, lam=0.0, scale="rms")
    raw = torch.tensor([0.0, -0.25, 0.75, -0.25]).double()
    found = torch.cat([credit.advantage_B_K1[0], credit.advantage_B_K1[1, :1]]).double()
    torch.testing.assert_close(found, raw / (raw.square().sum() / 3).sqrt())
