"""The registered advantage estimator ``info_gain`` and the way turns reach it.

verl calls an estimator with rewards, mask, config and group ids, nothing else. Our trainer brings turns
and gains through ``bring_turns``; verl's own step around the estimator (KL in the reward, rollout
correction) stays verl's. Called by a trainer that brings no turns, the estimator stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from verl_credit.credit import TurnCredit, spread, turn_credit
from verl_credit.host.fields import ADV_ESTIMATOR, TRAINER_MODE
from verl_credit.host.settings import CreditSettings


@dataclass
class TurnStep:
    """Turns of one batch, row for row as verl's data; the estimator writes its results back here."""

    settings: CreditSettings
    turn_ids_B_T: torch.Tensor
    info_gain_B_K: torch.Tensor
    turn_mask_B_K: torch.Tensor
    row_valid_B: torch.Tensor
    credit: TurnCredit | None = None
    clip_scale_B_T: torch.Tensor | None = None
    outcome_B: torch.Tensor | None = None
    group_B: torch.Tensor | None = None


_STEP: ContextVar[TurnStep | None] = ContextVar("verl_credit_turn_step", default=None)


@contextmanager
def bring_turns(step: TurnStep) -> Iterator[TurnStep]:
    token = _STEP.set(step)
    try:
        yield step
    finally:
        _STEP.reset(token)


@register_adv_est(ADV_ESTIMATOR)
def info_gain_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index=None, config=None, **_
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_B_T, returns_B_T): the turns' advantages on the tokens the policy wrote, 0 elsewhere.

    The outcome of a row is the sum of its token rewards (with ``use_kl_in_reward`` the KL penalty is in it).
    Modes, equations and edge cases: ``verl_credit.credit.turn_credit``.
    """
    step = _STEP.get()
    if step is None or index is None:
        raise RuntimeError(
            f"algorithm.adv_estimator={ADV_ESTIMATOR} needs turn ids and information gains, which this trainer "
            f"does not bring: set trainer.v1.trainer_mode={TRAINER_MODE}"
        )
    settings = step.settings
    step.outcome_B = token_level_rewards.sum(dim=-1)
    step.group_B = group_numbers(index)
    step.credit = turn_credit(
        step.outcome_B,
        step.info_gain_B_K,
        step.turn_mask_B_K,
        step.group_B,
        info_gain_norm_mode=settings.info_gain_norm_mode,
        gamma=settings.gamma,
        alpha=settings.adv_rescale_alpha,
        clip_beta=settings.clip_beta,
        norm_by_std=settings.norm_adv_by_std_in_grpo,
        row_valid_B=step.row_valid_B,
        on_nonfinite="raise",
    )
    step.clip_scale_B_T = spread(step.credit.clip_scale_B_K1, step.turn_ids_B_T, response_mask, fill=1.0)
    advantages_B_T = spread(step.credit.advantage_B_K1, step.turn_ids_B_T, response_mask)
    return advantages_B_T, advantages_B_T.clone()


def group_numbers(uids) -> torch.Tensor:
    """Prompt ids of any type -> 0, 1, ... in order of first appearance."""
    number: dict = {}
    return torch.tensor([number.setdefault(uid, len(number)) for uid in uids])
