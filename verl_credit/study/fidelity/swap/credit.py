"""The credit of a decision's turn when another rollout stands in the place of its own.

For every alternative and completion the group has the prompt's other rollouts, unchanged, and this one. A mode is called as
in training: one of batch scope sees the other groups of the training batch, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.records.report.again import NotOffered, TurnTables, credit_of_turns
from verl_credit.study.fidelity.controls import CONTINUATIONS, brought, fewer_turns
from verl_credit.study.fidelity.credit import batches, name_of, variants
from verl_credit.study.fidelity.swap.decisions import Decision
from verl_credit.study.fidelity.swap.worth import worth
from verl_credit.study.fidelity.values import Value, part_of
from verl_credit.worlds.rollouts.rollout import Trajectory
from verl_credit.worlds.rollouts.sampler import digest


def swapped_groups(
    group: Sequence[Trajectory], decision: Decision, completed: Sequence[Sequence[Trajectory]]
) -> list[list[Trajectory]]:
    """The group once for every alternative and completion, in this order, with it in place of the decision's trajectory."""
    place = decision.trajectory
    return [[*group[:place], one, *group[place + 1 :]] for of_one in completed for one in of_one]


def credit_of_modes(
    tables: TurnTables, decision: Decision, modes: Sequence[TurnMode], others: TurnTables | None
) -> dict[str, np.ndarray | str]:
    """By name, for every group of ``tables`` (`swapped_groups`) the credit of the decision's turn; or why there is none.

    ``others``: the other groups of the batch, of modes that read them.
    """
    found: dict[str, np.ndarray | str] = {}
    groups = batches(tables, 1)
    rows = int((tables.group_B == 0).sum())
    for mode, changes in variants(tables.pipeline, modes):
        if others is not None and reads_batch(mode, changes, tables.pipeline):
            parts = [beside(group, others) for group in groups]
        else:
            parts = [tables]
        try:
            credit = [credit_of_turns(part, mode, **changes).advantage_B_K1 for part in parts]
        except NotOffered as error:
            found[name_of(mode, changes)] = str(error)
        else:
            # A part begins with swapped groups, and the others' rows come after them.
            of_turn = [one[decision.trajectory :: rows, decision.turn] for one in credit]
            per_part = len(groups) // len(parts)
            found[name_of(mode, changes)] = torch.cat([one[:per_part] for one in of_turn]).numpy()
    return found


def reads_batch(mode: TurnMode, changes: Mapping, pipeline: Mapping) -> bool:
    """Can rows of other prompts matter to it?"""
    operator = changes.get("outcome_operator", pipeline["outcome_operator"])
    by_outcome = mode.any_outcome_operator and operator in OUTCOME_OPERATORS
    return "batch" in (mode.scope, OUTCOME_OPERATORS[operator].scope if by_outcome else "group")


def beside(tables: TurnTables, others: TurnTables) -> TurnTables:
    """Rows of both as one batch, those of ``tables`` first; groups and anchors are numbered on."""
    both = {}
    for name, fill in (("reward_B_K", 0.0), ("has_reward_B_K", False), ("tokens_B_K1", 0),
                       ("advantage_B_K1", 0.0), ("clip_scale_B_K1", 1.0)):  # fmt: skip
        both[name] = _joined(getattr(tables, name), getattr(others, name), fill)
    for name in ("outcome_B", "valid_B", "n_tool_turns_B"):
        both[name] = torch.cat([getattr(tables, name), getattr(others, name)])
    both["group_B"] = torch.cat([tables.group_B, others.group_B + int(tables.group_B.max()) + 1])
    if tables.anchor_B_K1 is not None:
        further = int(tables.anchor_B_K1.max()) + 1
        anchor_B_K1 = torch.where(others.anchor_B_K1 >= 0, others.anchor_B_K1 + further, -1)
        both["anchor_B_K1"] = _joined(tables.anchor_B_K1, anchor_B_K1, -1)
    rows, uids = [*tables.rows, *others.rows], [*tables.uids, *others.uids]
    return replace(tables, rows=rows, uids=uids, **both)


def _joined(a: torch.Tensor, b: torch.Tensor, fill: float) -> torch.Tensor:
    wide = max(a.shape[1], b.shape[1])
    pad = torch.nn.functional.pad
    return torch.cat([pad(one, (0, wide - one.shape[1]), value=fill) for one in (a, b)])


def credit_of_controls(
    tables: TurnTables,
    groups: Sequence[Sequence[Trajectory]],
    decision: Decision,
    data: Sequence[Mapping],
    drawn: np.random.Generator,
) -> dict[str, np.ndarray | str]:
    """Those of `controls` that read a group as modes do, and random credit."""
    found: dict[str, np.ndarray | str] = {"random": drawn.standard_normal(len(groups))}
    for credit in (fewer_turns(tables, [len(group) for group in groups]), brought(groups, data)):
        if credit.advantages is None:
            found[credit.name] = credit.reason
        else:
            of_turn = [group[decision.trajectory][decision.turn] for group in credit.advantages]
            found[credit.name] = np.array(of_turn)
    return found


def monte_carlo(decision: Decision, values: Mapping[str, Value]) -> dict[str, np.ndarray | str]:
    """Q of each alternative less V(s_k), by as many of the first continuations as `controls` takes.

    The first half chooses the alternative that regret is taken to: as many or more would be compared with themselves.
    """
    half = next(iter(values.values())).continuations // 2
    found: dict[str, np.ndarray | str] = {}
    for n in CONTINUATIONS:
        if n >= half:
            reason = f"as many choose the best alternative; expected --continuations {2 * n + 2} at least"
            found[f"Monte Carlo, {n}"] = reason
        else:
            few = part_of(values, slice(n))
            before = few[digest(decision.state.ids)].value
            found[f"Monte Carlo, {n}"] = np.array([worth(a, few) - before for a in decision.alternatives])
    return found
