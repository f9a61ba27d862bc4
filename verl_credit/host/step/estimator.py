"""The registered advantage estimator ``info_gain`` and the way turns reach it.

verl calls an estimator with rewards, mask, config and group ids, nothing else. Our trainer brings the step's inputs
through ``bring_turns`` and finds the step's credit there. verl's own step around the estimator (KL in the reward, rollout
correction) stays verl's. Called by a trainer that brings no turns, the estimator stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from verl_credit.names import ADV_ESTIMATOR, TRAINER_MODE
from verl_credit.turns.step.assign import StepCredit, StepInputs, assign, group_numbers


@dataclass
class Step:
    """A step's inputs, and its credit once verl has called the estimator; another estimator leaves None."""

    inputs: StepInputs
    credit: StepCredit | None = None


_STEP: ContextVar[Step | None] = ContextVar("verl_credit_turn_step", default=None)


@contextmanager
def bring_turns(inputs: StepInputs) -> Iterator[Step]:
    step = Step(inputs)
    token = _STEP.set(step)
    try:
        yield step
    finally:
        _STEP.reset(token)


@register_adv_est(ADV_ESTIMATOR)
def info_gain_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index=None, config=None, **_
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_B_T, returns_B_T), by ``verl_credit.turns.step.assign``.

    The outcome of a row is the sum of its token rewards (with ``use_kl_in_reward`` the KL penalty is in it).
    """
    step = _STEP.get()
    if step is None or index is None:
        raise RuntimeError(
            f"algorithm.adv_estimator={ADV_ESTIMATOR} needs turn ids and information gains, which this trainer "
            f"does not bring: set trainer.v1.trainer_mode={TRAINER_MODE}"
        )
    outcome_B, group_B = token_level_rewards.sum(dim=-1), group_numbers(index)
    step.credit = assign(step.inputs, outcome_B, group_B, response_mask)
    advantage_B_T, return_B_T = step.credit.advantage_B_T, step.credit.return_B_T
    return advantage_B_T, advantage_B_T.clone() if return_B_T is None else return_B_T.float()
