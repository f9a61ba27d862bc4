"""The memory across runs: a table of trials that people and agents read, and what the table has no column for."""

from verl_credit.records.lineage.prompt import LineageSnapshot
from verl_credit.records.lineage.store import LineageError, LineageStore
from verl_credit.records.lineage.table import Damage
from verl_credit.records.lineage.trial import COLUMNS, FailureLabel, RecipeEdit, Trial, Verdict, verdict

__all__ = [
    "COLUMNS", "Damage", "FailureLabel", "LineageError", "LineageSnapshot", "LineageStore", "RecipeEdit", "Trial",
    "Verdict", "verdict",
]  # fmt: skip
