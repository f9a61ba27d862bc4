"""The interface of the scorers of information gain, and the forward that the host offers to them.

A scorer gives the mean log-prob of the gold tokens after every context of a step. It is one file here and an entry in
`SCORERS`; other code uses only its attributes and methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch

from verl_credit.config.resolved import Config
from verl_credit.config.settings import CreditSettings
from verl_credit.turns.answer import PseudoAnswer
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.book import RowRecord
from verl_credit.turns.branches import BranchPlan
from verl_credit.turns.requests import Request

Generate = Callable[[list[int], dict], Awaitable]
"""The rollout server: (prompt, sampling parameters) -> its output."""


@dataclass(frozen=True)
class ScoreRow:
    """A context and the pseudo-answer after it."""

    context_ids: tuple[int, ...]
    answer: PseudoAnswer


class Forward(Protocol):
    """The trainer's ``old_log_probs`` forward for a scorer."""

    budget: int | None
    """Tokens of a micro-batch; None where micro-batches are counted in rows."""

    def carry(self, branches: torch.Tensor) -> None:
        """Appends these answers (`encode_branches`, nested) to their rows; called before the forward."""

    def carried(self) -> list[torch.Tensor]:
        """Returns the log-probs of each row's answer tokens after the forward."""

    def written(self) -> list[torch.Tensor]:
        """Returns the log-probs of each row's response after the forward."""

    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        """Mean log-prob of the gold tokens of ordinary rows, by a separate forward."""


@dataclass(frozen=True)
class GainPlan:
    """The requests of a step, made before ``old_log_probs`` are computed."""

    turns: TurnBatch
    settings: CreditSettings
    scorer: Scorer
    scored: bool
    """False: a step of plain GRPO; there are no requests."""
    requests: list[Request]
    branches: BranchPlan
    """A branch per distinct context and answer."""
    n_gains: int = 0
    """The number of first requests that are for information gain; the others are for infopo."""

    @property
    def gains(self) -> GainPlan:
        """The plan with only the requests of information gain."""
        return self._part(slice(self.n_gains))

    @property
    def masked(self) -> GainPlan:
        """The plan with only the requests of infopo."""
        return self._part(slice(self.n_gains, None))

    def _part(self, part: slice) -> GainPlan:
        branches = replace(self.branches, place_N=self.branches.place_N[part])
        return replace(self, requests=self.requests[part], branches=branches)


class Scorer(ABC):
    """A scorer. The defaults suit a scorer with a separate forward; `score` and `says` have no default."""

    name: ClassVar[str]
    rides: ClassVar[bool] = False
    """The answers are appended to their rows in the old_log_probs forward."""
    in_rollout: ClassVar[bool] = False
    """The rollout server scores, at the end of each trajectory (`score_rollout`)."""

    def needs(self, config: Config) -> None:  # noqa: B027  (most need nothing)
        """Raise ConfigError for a configuration that this scorer cannot work with."""

    def answers_behind_row(self, config: Config) -> int:
        """The number of answers at the longest row of a log-prob micro-batch."""
        return 1

    async def score_rollout(
        self,
        requests: Sequence[Request],
        sequence: Sequence[int],
        generate: Generate,
        max_model_len: int | None,
        record: RowRecord,
    ) -> None:
        """Write the scores of a trajectory into its record. ``sequence``: its prompt and response."""
        raise NotImplementedError(f"{self.name} does not score in the rollout")

    def before_forward(self, plan: GainPlan, forward: Forward) -> GainPlan:
        """The plan after requests that exceed the budget are dropped; it is called for steps that score."""
        return plan

    @abstractmethod
    def score(self, plan: GainPlan, forward: Forward) -> torch.Tensor:
        """Mean log-prob of the gold tokens of every request, float64 [N]. NaN: the score failed."""

    def n_scored(self, plan: GainPlan) -> int:
        """Distinct contexts and answers of the plan."""
        return len(set(plan.branches.place_N) - {None})

    def cost(self, plan: GainPlan, around_s: float, forward_s: float) -> dict[str, float]:
        """``credit/gain/seconds`` and more. ``around_s``: measured around the forward; ``forward_s``: the forward itself."""
        return {"credit/gain/seconds": around_s}

    @abstractmethod
    def says(self, config: Config, settings: CreditSettings) -> str:
        """The cost in words, for `explain`."""
