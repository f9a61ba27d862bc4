"""Credit that no mode gives, beside which a mode's number can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verl_credit.fidelity.credit import Credit, nested
from verl_credit.report.again import TurnTables, credit_of_turns

PENALTY = 0.1
"""Per turn: a credit can be good only because it asks for fewer turns."""


def fewer_turns(tables: TurnTables, sizes: Sequence[int]) -> Credit:
    """GRPO of the outcome less ``PENALTY`` for every turn."""
    penalised = replace(tables, outcome_B=tables.outcome_B - PENALTY * (tables.n_tool_turns_B + 1))
    credit = credit_of_turns(penalised, "none", outcome_operator="grpo")
    name = f"none, {PENALTY:g} less per turn"
    return Credit(name, nested(credit.advantage_B_K1, tables.n_tool_turns_B, sizes))
