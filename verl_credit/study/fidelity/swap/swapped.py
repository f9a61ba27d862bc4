"""The credit of a decision's turn when another rollout replaces its own.

For every alternative and completion the group has the prompt's other rollouts, unchanged, and this one. A mode is called as
in training: one of batch scope sees the other groups of the training batch, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.records.report.again import TurnTables
from verl_credit.study.fidelity.controls import CONTINUATIONS, brought, fewer_turns
from verl_credit.study.fidelity.mode_credit import Credit, batches, credits_of_parts, rows_of
from verl_credit.study.fidelity.subject import Subject
from verl_credit.study.fidelity.swap.decisions import Decision, worth
from verl_credit.study.fidelity.training import tables_of
from verl_credit.study.fidelity.values import Value, part_of
from verl_credit.worlds.rollouts.rollout import Groups, Trajectory
from verl_credit.worlds.rollouts.sampler import digest


class Maker:
    """Every credit of a decision, for all of its alternatives and completions. ``groups`` are those of all prompts."""

    def __init__(self, subject: Subject, groups: Groups, modes: Sequence[TurnMode], seed: int):
        self._subject, self._groups, self._modes = subject, groups, modes
        self._settings = CreditSettings.from_config(subject.config)
        self._drawn = np.random.default_rng(seed)
        self._all = self._tables(groups)

    def __call__(
        self, decision: Decision, completed: list[list[Trajectory]], values: Mapping[str, Value]
    ) -> list[Credit]:
        """The same names in the same order for every decision; ``advantages``: [alternatives, completions]."""
        groups = swapped_groups(self._groups[decision.prompt], decision, completed)
        tables, shape = self._tables(groups), (len(completed), len(completed[0]))
        credits = [
            *credit_of_modes(tables, decision, self._modes, self._others(decision.prompt)),
            *credit_of_controls(tables, groups, decision, self._subject.data, self._drawn),
            *monte_carlo(decision, values),
        ]
        return [_reshaped(credit, shape) for credit in credits]

    def _tables(self, groups: Groups) -> TurnTables:
        subject = self._subject
        with subject.forward() as forward:
            return tables_of(subject.batch(groups), groups, self._settings, forward, subject.tokenizer)[0]

    def _others(self, prompt: int) -> TurnTables | None:
        """The rest of the training batch that the prompt is in."""
        size, group_B = self._subject.config.data.train_batch_size, self._all.group_B
        chosen_B = (group_B // size == prompt // size) & (group_B != prompt)
        return rows_of(self._all, chosen_B) if chosen_B.any() else None


def _reshaped(credit: Credit, shape: tuple[int, int]) -> Credit:
    """Monte Carlo's is the same whatever the completion."""
    if credit.advantages is None:
        return credit
    return replace(credit, advantages=np.broadcast_to(credit.advantages.reshape(shape[0], -1), shape))


def swapped_groups(
    group: Sequence[Trajectory], decision: Decision, completed: Groups
) -> list[list[Trajectory]]:
    """The group for every alternative and completion, in this order, with each in place of the decision's trajectory."""
    place = decision.trajectory
    return [[*group[:place], path, *group[place + 1 :]] for paths in completed for path in paths]


def credit_of_modes(
    tables: TurnTables, decision: Decision, modes: Sequence[TurnMode], others: TurnTables | None
) -> list[Credit]:
    """The credit of the decision's turn in every group of ``tables`` (`swapped_groups`).

    ``others``: the other groups of the batch, for modes that read them.
    """
    groups, rows = batches(tables, 1), int((tables.group_B == 0).sum())

    def parts(mode: TurnMode, changes: Mapping) -> list[TurnTables]:
        if others is not None and reads_batch(mode, changes, tables.pipeline):
            return [beside(group, others) for group in groups]
        return [tables]

    def of_turn(advantages: list[torch.Tensor]) -> np.ndarray:
        # A part begins with swapped groups, and the others' rows come after them.
        per_part = len(groups) // len(advantages)
        return torch.cat(
            [a[decision.trajectory :: rows, decision.turn][:per_part] for a in advantages]
        ).numpy()

    return credits_of_parts(tables.pipeline, modes, parts, of_turn)


def reads_batch(mode: TurnMode, changes: Mapping, pipeline: Mapping) -> bool:
    """Can rows of other prompts matter to the mode?"""
    operator = changes.get("outcome_operator", pipeline["outcome_operator"])
    by_outcome = mode.any_outcome_operator and operator in OUTCOME_OPERATORS
    return "batch" in (mode.scope, OUTCOME_OPERATORS[operator].scope if by_outcome else "group")


def beside(tables: TurnTables, others: TurnTables) -> TurnTables:
    """Rows of both as one batch, ``tables`` first; groups and anchors are numbered on."""
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
    groups: Groups,
    decision: Decision,
    data: Sequence[Mapping],
    drawn: np.random.Generator,
) -> list[Credit]:
    """Random credit, and the credits of `controls` that read a group as modes do."""
    credits = [Credit("random", drawn.standard_normal(len(groups)), kind="control")]
    for credit in (fewer_turns(tables, [len(group) for group in groups]), brought(groups, data)):
        if credit.advantages is not None:
            of_turn = [group[decision.trajectory][decision.turn] for group in credit.advantages]
            credit = replace(credit, advantages=np.array(of_turn))
        credits.append(credit)
    return credits


def monte_carlo(decision: Decision, values: Mapping[str, Value]) -> list[Credit]:
    """Q of each alternative less V(s_k), by as many of the first continuations as `controls` takes.

    The first half chooses the alternative that regret is taken to: as many or more would be compared with themselves.
    """
    half = next(iter(values.values())).continuations // 2
    credits = []
    for n in CONTINUATIONS:
        credit, reason = None, ""
        if n >= half:
            reason = f"as many choose the best alternative; expected --continuations {2 * n + 2} at least"
        else:
            few = part_of(values, slice(n))
            before = few[digest(decision.state.ids)].value
            credit = np.array([worth(a, few) - before for a in decision.alternatives])
        credits.append(Credit(f"Monte Carlo, {n}", credit, reason, "control", held_out=True))
    return credits
