"""The tables of a step's turns, and the credit that a turn mode gives to all of them with the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl_credit.credit.turn.mode import OPTIONAL_TABLES, TurnCredit, TurnMode
from verl_credit.credit.turn.turn_credit import BatchTables, credit_of


class NotOffered(ValueError):
    """The tables lack what a mode reads; the message has the reason."""


@dataclass(frozen=True)
class TurnTables:
    """All rows of a step, as a turn mode reads them."""

    pipeline: Mapping[str, Any]
    """The run's settings: ``mode``, ``turn_params``, ``outcome_operator``, ``tied_groups``, and in ``shared`` the options
    that several modes have."""
    outcome_B: torch.Tensor
    reward_B_K: torch.Tensor
    has_reward_B_K: torch.Tensor
    group_B: torch.Tensor
    valid_B: torch.Tensor
    n_tool_turns_B: torch.Tensor
    tokens_B_K1: torch.Tensor
    anchor_B_K1: torch.Tensor | None

    @property
    def batch(self) -> BatchTables:
        anchors = {} if self.anchor_B_K1 is None else {"anchor_B_K1": self.anchor_B_K1}
        return BatchTables(
            self.outcome_B, self.reward_B_K, self.has_reward_B_K, self.group_B, self.valid_B, self.n_tool_turns_B,
            {"turn_tokens_B_K1": self.tokens_B_K1} | anchors,
        )  # fmt: skip


def credit_of_turns(tables: TurnTables, mode: TurnMode, **changes: float) -> TurnCredit:
    """Returns the credit of every row by ``mode``, with the run's settings but for ``changes`` (alpha, gamma).

    Raises NotOffered where the tables lack what the mode reads.
    """
    pipeline, batch = tables.pipeline, tables.batch
    for name in mode.reads:
        if any(one in mode.needs and one not in batch.optional for one in OPTIONAL_TABLES.get(name, ())):
            raise NotOffered(f"it needs {name}, which this run did not record")
    known_B_K = tables.has_reward_B_K & tables.valid_B[:, None] & tables.reward_B_K.isfinite()
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
