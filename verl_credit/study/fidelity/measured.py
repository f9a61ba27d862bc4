"""What a measurement asks of a policy, whatever rolls it out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from omegaconf import DictConfig

from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.scorers import Forward
from verl_credit.worlds.rollouts.protocol import State
from verl_credit.worlds.rollouts.rollout import Start, Trajectory


class Measured(Protocol):
    """`subject.Subject` answers in this process, `host.measure` by a run's own workers."""

    name: str
    config: DictConfig
    tokenizer: object
    prompts: list[State]
    """Before the first turn, a prompt each."""
    data: list[dict]
    """The questions' rows of the data set."""
    step: int | None
    engine: str
    """What rolls it out."""

    def roll(self, starts: Sequence[Start]) -> list[list[Trajectory]]:
        """The trajectories of every start."""

    def batch(self, groups: Sequence[Sequence[Trajectory]]) -> TurnBatch:
        """Their rows, as a step of training reads them."""

    def forward(self) -> AbstractContextManager[Forward]:
        """The policy's log-probs, for gains by rows."""

    def about(self) -> dict:
        """Which policy it is, and how it is rolled out."""
