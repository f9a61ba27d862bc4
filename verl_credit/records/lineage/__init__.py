"""The memory across runs: a table of trials that people and agents read before the next one."""

from verl_credit.records.lineage.store import LineageStore
from verl_credit.records.lineage.trial import COLUMNS, FailureLabel, Trial, Verdict, verdict

__all__ = ["COLUMNS", "FailureLabel", "LineageStore", "Trial", "Verdict", "verdict"]
