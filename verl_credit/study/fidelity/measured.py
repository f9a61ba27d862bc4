"""What a measurement needs of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from omegaconf import DictConfig

from verl_credit.turns.book import TurnBatch
from verl_credit.turns.scorers import Forward
from verl_credit.worlds.rollouts.protocol import State
from verl_credit.worlds.rollouts.rollout import Groups, Start, Trajectory


class Measured(Protocol):
    """The policy of a measurement: `subject.Subject` in this process, `host.measure` through a run's own workers."""

    name: str
    config: DictConfig
    tokenizer: object
    prompts: list[State]
    """The states before the first turn, one for each prompt."""
    data: list[dict]
    """The questions' rows of the data set."""
    step: int | None
    engine: str
    """The engine of the rollouts."""

    def roll(self, starts: Sequence[Start]) -> list[list[Trajectory]]:
        """The trajectories of every start."""

    def batch(self, groups: Groups) -> TurnBatch:
        """The groups' rows, as a step of training reads them."""

    def forward(self) -> AbstractContextManager[Forward]:
        """The policy's log-probs, for gains by rows."""

    def about(self) -> dict:
        """The policy and the settings of its rollouts, as ``about.json`` has them."""
