"""``actor_rollout_ref.actor.policy_loss.*``: the turn loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_credit.config.keys import reads
from verl_credit.config.keys.section import Section, When
from verl_credit.credit.loss import RATIO_LEVELS

LOSS = "actor_rollout_ref.actor.policy_loss"
TARGET = "verl_credit.host.actor.loss.TurnPolicyLossConfig"
"""``_target_``: verl's class refuses the keys below."""


class PolicyLoss(Section):
    prefix = LOSS

    ratio_level: Annotated[Literal[tuple(RATIO_LEVELS)], When(reads.turn_loss)] = "turn"
    """Level of the importance ratio."""
    dynamic_clip: bool | Literal["auto"] = "auto"
    """Scale each turn's clip range by its gain; auto: where the mode gives turns a scale and the loss is ours."""
    clip_beta: Annotated[float, Field(ge=0, lt=1), When(reads.scaled_clip)] = 0.3
    """Largest relative change of the clip range, below 1: at 1 a turn's range could shrink to nothing."""
