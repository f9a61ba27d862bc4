"""The tables of a step's turns, and the credit that a turn mode gives to all of them with the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verl_credit.credit.turn.mode import OPTIONAL_TABLES, TurnCredit, TurnMode
from verl_credit.credit.turn.turn_credit import BatchTables, credit_of


class NotOffered(ValueError):
    """The tables lack what a mode reads; the message has the reason."""


@dataclass(frozen=True)
class TurnTables:
    """All rows of a step, in the order of prompts and their rollouts."""

    pipeline: Mapping[str, Any]
    """The run's settings: ``mode``, ``turn_params``, ``outcome_operator``, ``tied_groups``, and in ``shared`` the options
    that several modes have."""
    batch: BatchTables

    def per_turn(self, value_B_K1: torch.Tensor) -> np.ndarray:
        """[N], without the columns after a row's ending turn."""
        turn_B_K1 = torch.arange(value_B_K1.shape[1]) <= self.batch.n_tool_turns_B[:, None]
        return value_B_K1[turn_B_K1].double().numpy()

    def batches(self, prompts: int) -> list[TurnTables]:
        """The rows in batches of neighbouring prompts, which are numbered from 0 in the order of the rows."""
        group_B, parts = self.batch.group_B, []
        for start in range(0, int(group_B.max()) + 1, prompts):
            chosen_B = (group_B >= start) & (group_B < start + prompts)
            of_part = {
                name: {one: table[chosen_B] for one, table in value.items()}
                if name == "optional"
                else value[chosen_B]
                for name, value in vars(self.batch).items()
            }
            of_part["group_B"] = of_part["group_B"] - start
            parts.append(replace(self, batch=BatchTables(**of_part)))
        return parts


def credit_of_turns(tables: TurnTables, mode: TurnMode, **changes: float) -> TurnCredit:
    """Returns the credit of every row by ``mode``, with the run's settings but for ``changes`` (alpha, gamma).

    Raises NotOffered where the tables lack what the mode reads.
    """
    pipeline, batch = tables.pipeline, tables.batch
    for name in mode.reads:
        if any(one in mode.needs and one not in batch.optional for one in OPTIONAL_TABLES.get(name, ())):
            raise NotOffered(f"it needs {name}, which this run did not record")
    known_B_K = batch.has_reward_B_K & batch.valid_B[:, None] & batch.reward_B_K.isfinite()
    if mode.reads_turn_rewards and not known_B_K.any() and mode.name != pipeline["mode"]:
        raise NotOffered("no turn of this step has a reward")
    options = {name: value for name, value in pipeline["shared"].items() if name in mode.options}
    if mode.name == pipeline["mode"]:
        options |= pipeline["turn_params"]
    if mode.any_outcome_operator:
        options["outcome_operator"] = pipeline["outcome_operator"]
    try:
        return credit_of(mode, batch, {"tied_groups": pipeline["tied_groups"]} | options | changes)
    except ValueError as error:
        raise NotOffered(str(error)) from error
