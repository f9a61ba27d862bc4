"""The advantages of one step's batch: turns' credit, then the token level, on the tokens that the policy wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.credit import TurnCredit, spread, turn_table
from verl_credit.credit.plugins import TurnInputs
from verl_credit.errors import IntegrityError
from verl_credit.turns.token_stage import TokenInputs, TokenStage

StepTables = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, float]]


@dataclass
class TurnStep:
    """Turns of one batch, row for row as verl's data; `advantages_of` writes its results back here."""

    settings: CreditSettings
    turn_ids_B_T: torch.Tensor
    turn_reward_B_K: torch.Tensor
    turn_mask_B_K: torch.Tensor
    row_valid_B: torch.Tensor
    tables: Callable[[torch.Tensor, torch.Tensor], StepTables] | None = None
    """(outcome_B, group_B) -> turn rewards, their mask, the mode's optional tables, metrics; None where the rewards stand
    here already."""
    scored: bool = True
    """False: a step without turn rewards (`info_gain_every`, `info_gain_warmup_steps`)."""
    gain_scale: float = 1.0
    outcome_scale: float = 1.0
    stage: TokenStage | None = None
    """Outcome operator and token level; None stands for GRPO and no token level."""
    tokens: TokenInputs | None = None
    signals: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Each turn signal's own (values_B_K, has_B_K), before weights."""
    anchor_B_K1: torch.Tensor | None = None
    observations_B: list[list[str]] | None = None
    """What the tools of each row returned, for an algorithm of the user's."""
    credit: TurnCredit | None = None
    clip_scale_B_T: torch.Tensor | None = None
    outcome_B: torch.Tensor | None = None
    group_B: torch.Tensor | None = None
    token_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rewarded_B_K(self) -> torch.Tensor:
        """Turns of rows that count whose reward is known."""
        return self.turn_mask_B_K & self.row_valid_B[:, None] & self.turn_reward_B_K.isfinite()


def advantages_of(
    step: TurnStep, outcome_B: torch.Tensor, group_B: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """advantages_B_T; the step keeps the turns' credit, the clip's scale and the metrics.

    ``response_mask`` is the one after rejection by rollout correction: rejected tokens get 0 and are in no token statistic.
    Rows and turns that lost tokens keep their outcome and gain in the statistics of their group, as with verl's own
    estimators.
    Modes, equations and edge cases: ``verl_credit.credit.turn.turn_credit``. An outcome that is not finite stops the run; a
    turn reward that is NaN is a missing one.
    """
    settings = step.settings
    step.outcome_B, step.group_B = outcome_B, group_B
    _check_outcomes(step)
    optional: dict[str, torch.Tensor] = {}
    if step.tables is not None:
        found = step.tables(step.outcome_B, step.group_B)
        step.turn_reward_B_K, step.turn_mask_B_K, optional, step.token_metrics = found
        step.anchor_B_K1 = optional.get("anchor_B_K1", step.anchor_B_K1)
    table = turn_table(step.turn_ids_B_T, step.turn_ids_B_T >= 0)
    mode, options = settings.algorithm.turn_mode, settings.turn_options
    if "turn_tokens_B_K1" in mode.tables:
        optional["turn_tokens_B_K1"] = table.n_tokens_B_K1
    if mode.any_outcome_operator:
        options["outcome_operator"] = "grpo" if step.stage is None else step.stage.outcome_operator
    if mode.curriculum:
        options |= {"gain_scale": step.gain_scale, "outcome_scale": step.outcome_scale}
    step.credit = mode(
        step.outcome_B,
        step.turn_reward_B_K,
        step.turn_mask_B_K,
        step.group_B,
        row_valid_B=step.row_valid_B,
        n_tool_turns_B=table.n_tool_turns_B,
        tied_groups=settings.algorithm.tied_groups,
        **optional,
        **options,
    )
    step.clip_scale_B_T = spread(step.credit.clip_scale_B_K1, step.turn_ids_B_T, response_mask, fill=1.0)
    advantages_B_T = spread(step.credit.advantage_B_K1, step.turn_ids_B_T, response_mask)
    if step.stage is not None and step.stage.active:
        advantages_B_T, token_metrics = step.stage.apply(
            advantages_B_T,
            step.credit.outcome_advantage_B,
            step.outcome_B,
            step.group_B,
            step.tokens,
            trained_B_T=response_mask,
            turns=TurnInputs(
                step.turn_ids_B_T,
                step.turn_reward_B_K,
                step.turn_mask_B_K,
                step.anchor_B_K1,
                step.observations_B,
            ),
        )
        step.token_metrics |= token_metrics
        if settings.algorithm.replaces_turns:
            step.credit = as_turn_credit(advantages_B_T, step.turn_ids_B_T, response_mask, step.credit)
    counted_B_T = response_mask.bool() & step.row_valid_B[:, None]
    if counted_B_T.any():
        spread_t = advantages_B_T[counted_B_T].double().std(correction=0)
        step.token_metrics["credit/advantage/token_std"] = spread_t.item()
    return advantages_B_T


def _check_outcomes(step: TurnStep) -> None:
    bad_B = step.row_valid_B & ~step.outcome_B.isfinite()
    if bad_B.any():
        row = int(bad_B.nonzero()[0])
        raise IntegrityError(
            f"outcome of row {row} is {float(step.outcome_B[row])}: the reward function gave no finite number"
        )
    negative_B = step.row_valid_B & (step.outcome_B < 0)
    if step.settings.algorithm.advantage_mode == "maxrl" and negative_B.any():
        row = int(negative_B.nonzero()[0])
        raise IntegrityError(
            f"algorithm.advantage_mode=maxrl divides by the mean outcome, and row {row} of this step has outcome "
            f"{float(step.outcome_B[row]):g}: the reward function or the reward manager gives penalties; use another "
            "advantage_mode, or scores of at least 0"
        )


def as_turn_credit(
    advantage_B_T: torch.Tensor, turn_ids_B_T: torch.Tensor, mask_B_T: torch.Tensor, like: TurnCredit
) -> TurnCredit:
    """Means over turns of advantages that were made without turns, for metrics and trajectories.

    A turn whose tokens are all rejected by rollout correction has the mean 0.
    """
    table, mask_B_T = turn_table(turn_ids_B_T, turn_ids_B_T >= 0), mask_B_T.bool()
    ids_B_T = torch.where(mask_B_T, turn_ids_B_T, 0).long()
    sum_B_K1 = torch.zeros(like.advantage_B_K1.shape, dtype=torch.float64)
    n_B_K1 = sum_B_K1.scatter_add(1, ids_B_T, mask_B_T.double())
    sum_B_K1.scatter_add_(1, ids_B_T, torch.where(mask_B_T, advantage_B_T, 0.0).double())
    mean_B_K1 = sum_B_K1 / n_B_K1.clamp(min=1)
    answer_B = mean_B_K1.gather(1, table.n_tool_turns_B[:, None]).squeeze(1)
    own_B_K = torch.arange(mean_B_K1.shape[1] - 1) < table.n_tool_turns_B[:, None]
    tool_B_K = torch.where(own_B_K, mean_B_K1[:, :-1], answer_B[:, None])
    return TurnCredit(
        tool_B_K.to(like.advantage_B_K), answer_B.to(like.advantage_B_K), like.clip_scale_B_K, like.counts
    )


def group_numbers(uids) -> torch.Tensor:
    """Prompt ids of any type -> 0, 1, ... in order of first appearance."""
    number: dict = {}
    return torch.tensor([number.setdefault(uid, len(number)) for uid in uids])
