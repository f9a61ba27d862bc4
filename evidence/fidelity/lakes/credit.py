"""The credit of modes on lakes: by outcomes, by repeated states and by values.

There is no gold answer, so no information gain: a mode whose turn rewards are gains is not measured, and its reason says so.
The environment's own turn reward is 0 until the goal, and what the goal pays is the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lakes.score import Values
from verl_credit.credit import MODES
from verl_credit.credit.turn.anchors import exact_anchors
from verl_credit.study.fidelity.credits import Credit, mode_credits, nested
from verl_credit.study.fidelity.rows import outcomes_of
from verl_credit.study.fidelity.turn_tables import TurnTables
from verl_credit.worlds.rollouts.protocol import State
from verl_credit.worlds.rollouts.rollout import Trajectory
from verl_credit.worlds.rollouts.sampler import digest

BATCH = 16
"""Prompts at a time, as in training."""
ANCHORS: dict[str, Callable[[State], object]] = {
    "cell": lambda state: state.cell,
    "cell and moves left": lambda state: (state.cell, state.turn),
}
"""The same cell is the same state only if as many moves are left: the first anchor is what is usually taken."""
GAMMAS = (1.0, 0.95)
"""1 as in the lab. Below 1 a trajectory that arrives earned more from a later visit of a cell than from an earlier one."""
LAMBDAS = (1.0, 0.95, 0.0)
Groups = Sequence[Sequence[Trajectory]]


def grid_tables(groups: Groups) -> TurnTables:
    """What modes read of the groups; the last turn of an episode stands in the column of the answer turn."""
    outcome_B, group_B = outcomes_of(groups)
    rows = [trajectory for group in groups for trajectory in group]
    n_tool_turns_B = torch.tensor([len(trajectory.steps) - 1 for trajectory in rows])
    columns = int(n_tool_turns_B.max())
    has_reward_B_K = torch.arange(columns) < n_tool_turns_B[:, None]
    shared = {"gamma": 1.0, "norm_by_std": True}
    return TurnTables(
        pipeline={
            "mode": "none",
            "outcome_operator": "reinforce_pp",  # beside GRPO, RLOO and MaxRL, which are always there
            "tied_groups": "keep",
            "shared": shared,
            "turn_params": {},
        },
        outcome_B=outcome_B,
        reward_B_K=torch.zeros(len(rows), columns, dtype=torch.float64),
        has_reward_B_K=has_reward_B_K,
        group_B=group_B,
        valid_B=torch.ones(len(rows), dtype=torch.bool),
        n_tool_turns_B=n_tool_turns_B,
        tokens_B_K1=_of_turns(groups, lambda step: len(step.turn_ids), 0, torch.int64),
        anchor_B_K1=None,
    )


def grid_credits(tables: TurnTables, groups: Groups) -> list[Credit]:
    """Of every registered mode but `turn_gae` (`with_values`)."""
    sizes = [len(group) for group in groups]
    found = mode_credits(tables, sizes, [MODES["none"]], BATCH)
    for name, anchor in ANCHORS.items():
        states = [
            [anchor(step.state) for step in trajectory.steps] for group in groups for trajectory in group
        ]
        anchor_B_K1 = exact_anchors(states, tables.group_B.tolist(), columns=tables.tokens_B_K1.shape[1])
        by_states = [mode for mode in MODES.values() if "anchor_B_K1" in mode.needs]
        for gamma in GAMMAS:
            shared = tables.pipeline["shared"] | {"gamma": gamma}
            given = replace(tables, anchor_B_K1=anchor_B_K1, pipeline=tables.pipeline | {"shared": shared})
            made = mode_credits(given, sizes, by_states, BATCH)
            label = f"by {name}" if gamma == 1 else f"by {name}, gamma {gamma:g}"
            found += [replace(credit, name=f"{credit.name}, {label}") for credit in made]
    reason = "its turn rewards are information gain, and there is no gold answer here"
    gains = [
        m for m in MODES.values() if m.reads_turn_rewards and not {"anchor_B_K1", "value_B_K1"} & set(m.needs)
    ]
    return found + [Credit(mode.name, None, reason) for mode in gains]


def with_values(
    tables: TurnTables, groups: Groups, values: Values, name: str, held_out: bool = False
) -> list[Credit]:
    """`turn_gae` with these values of the contexts as its critic."""
    value_B_K1 = _of_turns(groups, lambda step: values[digest(step.state.ids)].value, 0.0, torch.float64)
    found = []
    for lam in LAMBDAS:
        credit = MODES["turn_gae"](
            tables.outcome_B,
            tables.reward_B_K,
            tables.has_reward_B_K,
            tables.group_B,
            n_tool_turns_B=tables.n_tool_turns_B,
            value_B_K1=value_B_K1,
            lam=lam,
        )
        advantages = nested(credit.advantage_B_K1, tables.n_tool_turns_B, [len(group) for group in groups])
        found.append(Credit(f"turn_gae, lam {lam:g}, {name}", advantages, held_out=held_out))
    return found


def _of_turns(groups: Groups, number, fill: float, dtype: torch.dtype) -> torch.Tensor:
    """[B, K1] of every turn, ``fill`` behind a row's last."""
    rows = [torch.tensor([number(s) for s in t.steps], dtype=dtype) for group in groups for t in group]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
