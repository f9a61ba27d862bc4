"""What a mode reads in an exact world, its shuffled control, and values that do not follow their own outcome."""

from dataclasses import replace

import pytest
import torch

from verl_credit.credit import MODES
from verl_credit.errors import PreflightError
from verl_credit.study.exact_worlds.chain_world import first_policy, roll, values
from verl_credit.study.exact_worlds.fed_credit import FedCredit
from verl_credit.study.fidelity.credits import find_mode

RUNS, QUESTIONS, HOPS = 3, 4, 2


@pytest.fixture(scope="module")
def rolled():
    random = torch.Generator().manual_seed(4)
    prob = first_policy(HOPS, RUNS, QUESTIONS, random).softmax(-1)
    tasks = torch.arange(QUESTIONS).repeat(RUNS)
    return roll(prob, random).rolled(values(prob)[0], QUESTIONS, tasks)


def test_a_shuffled_control_keeps_each_runs_multiset_and_breaks_the_pairing(rolled):
    dealt = rolled.shuffled(torch.Generator().manual_seed(0))
    places = {
        "signal_B_K": rolled.tool_turn_B_K,
        "state_B_K1": rolled.turn_B_K1,
        "seen_B_K1_D": rolled.turn_B_K1,
    }
    for name, turn_B_K in places.items():
        for run in range(RUNS):
            here = turn_B_K & (rolled.run_B == run)[:, None]
            before, after = (getattr(one, name)[here].view(int(here.sum()), -1) for one in (rolled, dealt))
            assert sorted(before.tolist()) == sorted(after.tolist())
            assert (before != after).any(1).float().mean() > 0.2
        assert torch.equal(getattr(dealt, name)[~turn_B_K], getattr(rolled, name)[~turn_B_K])
    for name in ("outcome_B", "n_tool_turns_B", "group_B", "task_B", "run_B"):
        assert getattr(dealt, name) is getattr(rolled, name)


@pytest.mark.parametrize(
    "mode, values, signals",
    [
        ("none", None, ()),
        ("joint", None, ("turn rewards",)),
        ("gigpo", None, ("anchors",)),
        ("turn_gae", None, ()),
        ("turn_gae", "true", ()),
        ("turn_gae", "state", ("anchors",)),
        ("turn_gae", "features", ("features",)),
        ("calibadv", None, ("turn rewards",)),
        ("gagpo", None, ("anchors",)),
    ],
)
def test_a_shuffle_changes_the_credit_of_what_reads_a_signal_and_no_other(rolled, mode, values, signals):
    dealt = rolled.shuffled(torch.Generator().manual_seed(0))
    of_mode = find_mode(mode, "MODE")
    assert FedCredit(of_mode, {}, values).signals == signals
    own, other = (FedCredit(of_mode, {}, values).advantages(one) for one in (rolled, dealt))
    assert torch.equal(own, other) == (not signals)
    assert (own[~rolled.turn_B_K1] == 0).all() and own[rolled.turn_B_K1].abs().max() > 0


@pytest.mark.parametrize(
    "mode, options", [("none", {"outcome_operator": "reinforce_pp"}), ("turn-group", {})]
)
def test_a_credit_of_the_batch_is_made_run_by_run(rolled, mode, options):
    whole = FedCredit(MODES[mode], options).advantages(rolled)
    changed = replace(
        rolled, outcome_B=torch.where(rolled.run_B == 0, 9 * rolled.outcome_B, rolled.outcome_B)
    )
    other = FedCredit(MODES[mode], options).advantages(changed)
    assert torch.equal(whole[rolled.run_B > 0], other[rolled.run_B > 0])
    assert not torch.equal(whole[rolled.run_B == 0], other[rolled.run_B == 0])


@pytest.mark.parametrize("provider", ["group", "features", "state"])
def test_a_value_does_not_follow_its_own_outcome(rolled, provider):
    found = []
    for flipped in (False, True):
        outcome_B = rolled.outcome_B.clone()
        outcome_B[5] = 1 - outcome_B[5] if flipped else outcome_B[5]
        credit = FedCredit(MODES["turn_gae"], {"lam": 0.5}, provider)
        credit.advantages(replace(rolled, outcome_B=outcome_B))
        found.append(credit.value_B_K1)
    assert torch.allclose(found[0][5], found[1][5], atol=1e-12)
    assert not torch.allclose(found[0][:5], found[1][:5], atol=1e-6)


def test_the_replay_joins_the_next_fit(rolled):
    credit = FedCredit(MODES["turn_gae"], {"lam": 0.5}, "features")
    first = credit.advantages(rolled)
    assert not torch.equal(credit.advantages(rolled), first)


@pytest.mark.parametrize(
    "mode, values, said",
    [("turn_gae", "hops", "--values hops.*group, features"), ("joint", "state", "--values state.*joint")],
)
def test_values_that_nothing_makes_or_reads_are_refused(mode, values, said):
    with pytest.raises(PreflightError, match=said):
        FedCredit(MODES[mode], {}, values)
