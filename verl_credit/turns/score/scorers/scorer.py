"""The interface of the scorers of information gain, the forward that the host offers to them, and the trainer's two scorers.

A scorer gives the mean log-prob of the gold tokens after every context of a step. It is a class and an entry in `SCORERS`;
other code uses only its attributes and methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from omegaconf import DictConfig

from verl_credit.config.fit import SHORT_ANSWER, turns_at_most
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError, IntegrityError
from verl_credit.lazy import torch
from verl_credit.policy.families import SCORER
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.score.branches import BranchPlan
from verl_credit.turns.score.requests import PseudoAnswer, Request


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

    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        """Mean log-prob of the gold tokens of ordinary rows, by a separate forward."""

    def score_by_reference(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        """`score_rows` by the frozen reference."""


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
    rollouts: TurnBatch
    """``turns`` with one row per rollout (`sessions.joined`)."""


class Scorer(ABC):
    """A scorer. The defaults suit a scorer with a separate forward; `score` and `says` have no default."""

    name: ClassVar[str]
    rides: ClassVar[bool] = False
    """The answers are appended to their rows in the old_log_probs forward."""
    frozen: ClassVar[bool] = False
    """The reference scores, whose weights training does not change."""

    def needs(self, config: DictConfig) -> None:  # noqa: B027  (most need nothing)
        """Raise ConfigError for a configuration that this scorer cannot work with."""

    def answers_behind_row(self, config: DictConfig) -> int:
        """The number of answers at the longest row of a log-prob micro-batch."""
        return 1

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
    def says(self, config: DictConfig, settings: CreditSettings) -> str:
        """The cost in words, for `explain`."""


class RowScorer(Scorer):
    """Scores an ordinary row per context. It is exact and costs O(turns x length) tokens; tests compare others with it."""

    name = "rows"

    def score(self, plan: GainPlan, forward: Forward) -> torch.Tensor:
        return forward.score_rows(self.rows(plan))

    def rows(self, plan: GainPlan) -> list[ScoreRow]:
        turns, rows = plan.turns, {request.row for request in plan.requests}
        ids_of = {row: turns.prompt_ids[row] + turns.response_ids[row] for row in rows}
        return [ScoreRow(tuple(ids_of[r.row][: r.base]), r.answer) for r in plan.requests]

    def says(self, config: DictConfig, settings: CreditSettings) -> str:
        rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        contexts = turns_at_most(config)[1]
        if contexts is None:
            return "one more row per context and alias through compute_log_prob"
        return f"up to {contexts} more rows per trajectory and alias through compute_log_prob: {rows * contexts} a step"


BYPASS = "algorithm.rollout_correction.bypass_mode"


class BranchScorer(Scorer):
    """Answers are appended to their rows in the old_log_probs forward (`turns/score/branches.py`)."""

    name = "branch"
    rides = True

    def needs(self, config: DictConfig) -> None:
        if select(config, BYPASS):
            use = "answers ride on the old_log_probs forward, which is then not made; set bypass_mode=false, or "
            use += f"{SCORER}=rows"
            raise ConfigError.of(config, BYPASS, SCORER, accepted=use)

    def answers_behind_row(self, config: DictConfig) -> int:
        return turns_at_most(config)[1] or 1  # without a limit only the bare prompt's is certain

    def before_forward(self, plan: GainPlan, forward: Forward) -> GainPlan:
        plan = fit_branches(plan, forward.budget)
        forward.carry(plan.branches.field())
        return plan

    def score(self, plan: GainPlan, forward: Forward) -> torch.Tensor:
        return plan.branches.scores(forward.carried())

    def cost(self, plan: GainPlan, around_s: float, forward_s: float) -> dict[str, float]:
        """The seconds hold the branches' share, by tokens, of the forward's seconds: an estimate."""
        branch = sum(plan.branches.tokens_B)
        rows = sum(map(len, plan.turns.prompt_ids)) + sum(map(len, plan.turns.response_ids))
        share = branch / max(1, branch + rows)
        return {"credit/gain/seconds": around_s + share * forward_s, "credit/gain/branch_token_share": share}

    def says(self, config: DictConfig, settings: CreditSettings) -> str:
        contexts, data = turns_at_most(config)[1], config.data
        answers = "an answer per context and alias is appended to its row of old_log_probs"
        if contexts is not None:
            share = contexts * SHORT_ANSWER / (data.max_prompt_length + data.max_response_length)
            answers = (
                f"up to {contexts} answers per alias are appended to each row of old_log_probs; with {SHORT_ANSWER} tokens "
                f"each they are {share:.1%} of the tokens of a full row"
            )
        return f"no forward of its own: {answers} (attention: {settings.attention})"


def fit_branches(plan: GainPlan, budget: int | None) -> GainPlan:
    """The plan whose rows, answers included, fit ``budget`` tokens (None: any number does). An answer that does not fit is a
    failed score."""
    if budget is None:
        return plan
    length_B = [len(p) + len(r) for p, r in zip(plan.turns.prompt_ids, plan.turns.response_ids, strict=True)]
    needed = max(n + more for n, more in zip(length_B, plan.branches.tokens_B, strict=True))
    if needed <= budget:
        return plan
    if plan.settings.algorithm.info_gain_on_error == "raise":
        raise IntegrityError(
            f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={budget} cannot hold a row and its answers: {needed} "
            "tokens. algorithm.info_gain_on_error=zero counts gains that do not fit as 0"
        )
    return replace(plan, branches=plan.branches.fitted(length_B, budget))
