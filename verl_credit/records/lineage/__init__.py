"""The memory across runs: a table of trials that people and agents read before the next one."""

from verl_credit.records.lineage.trial import COLUMNS, FailureLabel, Trial, Verdict, verdict
from verl_credit.records.lineage.trials import LineageStore

__all__ = ["COLUMNS", "FailureLabel", "LineageStore", "Trial", "Verdict", "verdict"]
