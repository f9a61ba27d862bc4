"""The scorers of information gain, one file each. `config/keys/algorithm.py` lists their names for the key."""

from collections.abc import Mapping
from types import MappingProxyType

from verl_credit.turns.scorers.branch import BranchScorer
from verl_credit.turns.scorers.rows import RowScorer
from verl_credit.turns.scorers.scorer import Forward, GainPlan, Scorer, ScoreRow
from verl_credit.turns.scorers.server import ServerScorer

SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {scorer.name: scorer for scorer in (BranchScorer(), RowScorer(), ServerScorer())}
)

__all__ = ["SCORERS", "Forward", "GainPlan", "ScoreRow", "Scorer"]
