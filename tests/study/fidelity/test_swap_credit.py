"""Credit of a swapped turn is what the mode gives to the whole training batch with the other rollout in it."""

import numpy as np
import pytest
import torch

from kit.choice_world import exact_value, found, world
from verl_credit.credit.turn.anchors import exact_anchors
from verl_credit.credit.turn.modes import MODES
from verl_credit.records.report.again import TurnTables, credit_of_turns
from verl_credit.study.fidelity.credits import name_of, rows_of
from verl_credit.study.fidelity.decisions import completed, find_decisions
from verl_credit.study.fidelity.rows import outcomes_of
from verl_credit.study.fidelity.swaps import (
    credit_of_controls,
    credit_of_modes,
    monte_carlo,
    reads_batch,
    swapped_groups,
)
from verl_credit.study.fidelity.values import Value
from verl_credit.worlds.rollouts.rollout import Start, roll
from verl_credit.worlds.rollouts.sampler import digest

QUESTIONS, ROLLOUTS, COMPLETIONS = 4, 4, 3
READ = [
    ("none", {"outcome_operator": "grpo"}),
    ("none", {"outcome_operator": "reinforce_pp"}),
    ("turn-group", {}),
    ("gigpo", {}),
    ("turn-group-v1d", {"alpha": 0.3}),
]


def tables_of_choice(groups, operator="reinforce_pp"):
    """As `tables_of`, with exact gains of value as turn rewards."""
    rows = [trajectory for group in groups for trajectory in group]
    n_tool_turns_B = torch.tensor([len(t.steps) - 1 for t in rows])
    K = int(n_tool_turns_B.max())
    reward_B_K, has_B_K = torch.zeros(len(rows), K), torch.zeros(len(rows), K, dtype=torch.bool)
    for row, trajectory in enumerate(rows):
        for k, step in enumerate(trajectory.steps[:-1]):
            gain = exact_value(*found(step.next.ids)) - exact_value(*found(step.state.ids))
            reward_B_K[row, k], has_B_K[row, k] = gain, True
    outcome_B, group_B = outcomes_of(groups)
    shared = {"gamma": 1.0, "alpha": 0.5, "clip_beta": 0.3, "norm_by_std": True, "gain_scale": 1.0}
    states = [[step.state.ids for step in trajectory.steps] for trajectory in rows]
    return TurnTables(
        pipeline={"mode": "none", "signals": {}, "outcome_operator": operator, "tied_groups": "keep",
                  "turn_params": {}, "shared": shared | {"outcome_scale": 1.0}},
        rows=list(range(len(rows))), uids=[str(group) for group in group_B.tolist()],
        outcome_B=outcome_B, reward_B_K=reward_B_K.double(), has_reward_B_K=has_B_K, group_B=group_B,
        valid_B=torch.ones(len(rows), dtype=torch.bool), n_tool_turns_B=n_tool_turns_B,
        tokens_B_K1=torch.full((len(rows), K + 1), 2), anchor_B_K1=exact_anchors(states, group_B.tolist(), columns=K + 1),
        advantage_B_K1=torch.zeros(len(rows), K + 1), clip_scale_B_K1=torch.ones(len(rows), K + 1),
    )  # fmt: skip


def by_name(credits):
    """What each credit gives, or why there is none."""
    return {c.name: c.reason if c.advantages is None else c.advantages for c in credits}


@pytest.fixture(scope="module")
def sample():
    sampler, protocol, states = world(QUESTIONS)
    groups = roll(sampler, protocol, [Start(state, ROLLOUTS, 0, "rollout") for state in states])
    decisions = find_decisions(groups, sampler, protocol, wanted=4, seed=0)
    ends = completed(decisions, groups, sampler, protocol, completions=COMPLETIONS, seed=0)
    assert len({d.turn for d in decisions}) > 1 and len({d.prompt for d in decisions}) > 2
    return groups, decisions, ends


def test_it_is_the_credit_in_the_whole_batch(sample):
    groups, decisions, ends = sample
    modes = [MODES[name] for name in dict(READ)]
    tables = tables_of_choice(groups)
    for decision, of_one in zip(decisions, ends, strict=True):
        swapped = swapped_groups(groups[decision.prompt], decision, of_one)
        others = rows_of(tables, tables.group_B != decision.prompt)
        made = by_name(credit_of_modes(tables_of_choice(swapped), decision, modes, others))
        row = ROLLOUTS * decision.prompt + decision.trajectory
        for number in range(0, len(swapped), COMPLETIONS):
            before, after = groups[: decision.prompt], groups[decision.prompt + 1 :]
            batch = tables_of_choice([*before, swapped[number], *after])
            for name, changes in READ:
                wanted = credit_of_turns(batch, name, **changes).advantage_B_K1[row, decision.turn]
                label = name_of(MODES[name], changes)
                assert made[label][number] == pytest.approx(float(wanted), abs=1e-9), (label, number)


def test_who_reads_the_batch():
    pipeline = {"outcome_operator": "grpo"}
    assert reads_batch(MODES["turn-group"], {}, pipeline)
    assert not reads_batch(MODES["joint"], {}, pipeline)
    assert not reads_batch(MODES["none"], {"outcome_operator": "rloo"}, {"outcome_operator": "reinforce_pp"})
    assert reads_batch(MODES["none"], {"outcome_operator": "reinforce_pp"}, pipeline)


def test_rloo_by_hand(sample):
    """r - the mean of the other rollouts, which stay as they are: credit differs by the outcome alone."""
    groups, decisions, ends = sample
    for decision, of_one in zip(decisions, ends, strict=True):
        group = groups[decision.prompt]
        swapped = swapped_groups(group, decision, of_one)
        made = by_name(credit_of_modes(tables_of_choice(swapped), decision, [MODES["none"]], None))[
            "none, rloo"
        ]
        others = [t.reward for place, t in enumerate(group) if place != decision.trajectory]
        outcome = np.array([path.reward for of_alternative in of_one for path in of_alternative])
        assert made == pytest.approx(outcome - np.mean(others))


def test_controls_read_the_swapped_group(sample):
    groups, decisions, ends = sample
    decision, of_one = decisions[0], ends[0]
    swapped = swapped_groups(groups[decision.prompt], decision, of_one)
    tables, data = tables_of_choice(swapped), [{"extra_info": None}] * QUESTIONS
    made = by_name(credit_of_controls(tables, swapped, decision, data, np.random.default_rng(0)))
    assert (
        len(set(made["random"].tolist())) == len(swapped) and "extra_info" in made["brought a needed article"]
    )
    z = []
    for group in swapped:
        r = np.array([t.reward - 0.1 * len(t.steps) for t in group])
        z.append(((r - r.mean()) / (r.std(ddof=1) + 1e-6))[decision.trajectory])
    assert made["none, 0.1 less per turn"] == pytest.approx(z, abs=1e-4)


def test_monte_carlo_is_less_than_the_half_that_chooses(sample):
    _, decisions, _ = sample
    decision = decisions[0]
    ids = {decision.state.ids, *(a.step.next.ids for a in decision.alternatives if a.step.next)}
    values = {digest(one): Value(digest(one), "1100" + "1" * 12) for one in ids}
    made = by_name(monte_carlo(decision, values))
    wanted = [0.0 if a.step.next else a.step.reward - 0.5 for a in decision.alternatives]
    assert made["Monte Carlo, 4"].tolist() == wanted
    assert made["Monte Carlo, 8"].endswith("expected --continuations 18 at least")
