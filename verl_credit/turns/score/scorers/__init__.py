"""The scorers of information gain. `config/keys/algorithm.py` lists their names for the key."""

from verl_credit.turns.score.scorers.reference import ReferenceScorer
from verl_credit.turns.score.scorers.scorer import (
    BranchScorer,
    Forward,
    GainPlan,
    RowScorer,
    Scorer,
    ScoreRow,
)

SCORERS: dict[str, Scorer] = {
    scorer.name: scorer for scorer in (BranchScorer(), RowScorer(), ReferenceScorer())
}

__all__ = ["SCORERS", "Forward", "GainPlan", "ScoreRow", "Scorer"]
