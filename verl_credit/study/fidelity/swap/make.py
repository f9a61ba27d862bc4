"""Every credit of a decision, for all of its alternatives and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.policy.packed import PackedPolicy
from verl_credit.records.report.again import TurnTables
from verl_credit.study.fidelity.credit import rows_of
from verl_credit.study.fidelity.rows import turn_batch
from verl_credit.study.fidelity.subject import Subject
from verl_credit.study.fidelity.swap.credit import (
    credit_of_controls,
    credit_of_modes,
    monte_carlo,
    swapped_groups,
)
from verl_credit.study.fidelity.swap.decisions import Decision, Groups
from verl_credit.study.fidelity.tables import tables_of
from verl_credit.study.fidelity.values import Value
from verl_credit.study.forward import PackedRows
from verl_credit.worlds.rollouts.rollout import Trajectory


@dataclass(frozen=True)
class Made:
    """Of one decision by one way of making credit; or the reason why there is none."""

    name: str
    kind: str
    """``mode`` or ``control``."""
    held_out: bool
    """It is made from the first half of the continuations, and compared with Q by the second half."""
    credit_A_C: np.ndarray | None
    reason: str = ""


class Maker:
    """``groups`` are those of all prompts."""

    def __init__(self, subject: Subject, groups: Groups, modes: Sequence[TurnMode], seed: int):
        self._subject, self._groups, self._modes = subject, groups, modes
        self._settings = CreditSettings.from_config(subject.config)
        self._policy = PackedPolicy(subject.model)
        self._drawn = np.random.default_rng(seed)
        self._all = self._tables(groups)

    def __call__(
        self, decision: Decision, completed: list[list[Trajectory]], values: Mapping[str, Value]
    ) -> list[Made]:
        """The same names in the same order for every decision."""
        groups = swapped_groups(self._groups[decision.prompt], decision, completed)
        tables, shape = self._tables(groups), (len(completed), len(completed[0]))
        of_modes = credit_of_modes(tables, decision, self._modes, self._others(decision.prompt))
        of_controls = credit_of_controls(tables, groups, decision, self._subject.data, self._drawn)
        of_values = monte_carlo(decision, values)
        found = []
        for kind, held_out, named in (
            ("mode", False, of_modes),
            ("control", False, of_controls),
            ("control", True, of_values),
        ):
            for name, credit in named.items():
                if isinstance(credit, str):
                    found.append(Made(name, kind, held_out, None, credit))
                else:  # Monte Carlo's is the same whatever the completion
                    credit_A_C = np.broadcast_to(credit.reshape(shape[0], -1), shape)
                    found.append(Made(name, kind, held_out, credit_A_C))
        return found

    def _tables(self, groups: Groups) -> TurnTables:
        rows = [trajectory for group in groups for trajectory in group]
        batch = turn_batch(rows, self._subject.truths, self._subject.data)
        forward = PackedRows(self._policy)
        with self._policy.packing():
            return tables_of(batch, groups, self._settings, forward, self._subject.tokenizer)[0]

    def _others(self, prompt: int) -> TurnTables | None:
        """The rest of the training batch that the prompt is in."""
        size, group_B = self._subject.config.data.train_batch_size, self._all.group_B
        chosen_B = (group_B // size == prompt // size) & (group_B != prompt)
        return rows_of(self._all, chosen_B) if chosen_B.any() else None
