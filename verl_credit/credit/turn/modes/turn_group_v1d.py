"""turn-group-v1d: gains compared per prompt and turn, their discounted sum rescaled by its length (A2TGPO)."""

from collections.abc import Callable

import torch

from verl_credit.credit.groups import EPS, VARIANCE_FLOOR
from verl_credit.credit.operator import CENTRED, NORMALISED, AtLeastZero, BelowOne, Count, Positive, Share
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


def turn_group_v1d(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    alpha: AtLeastZero = 0.3,
    clip_beta: BelowOne = 0.3,
    gain_scale: AtLeastZero = 1.0,
    outcome_scale: AtLeastZero = 1.0,
    outcome_operator: str | Callable[..., torch.Tensor] = "grpo",
    norm_by_std: bool = True,
    ddof: Count = 0,
    variance_floor: AtLeastZero = VARIANCE_FLOOR,
    eps: Positive = EPS,
) -> ModeOutput:
    """Compares gains per prompt and turn, and adds them up from a turn on; a turn's own gain scales its clip range.

        A_k = alpha D_k / sqrt(n_k) + R, A_answer = R
        D_k = sum over j >= k of gamma^(j-k) z_j over the n_k gains from k on, z_k = z(gain_k per prompt and turn)
        clip scale_k = 1 + clip_beta (2 sigmoid(z_k) - 1)

    A turn without a gain reads the advantage and clip scale of the row's next gain.
    """
    norm = {"norm_by_std": norm_by_std, "ddof": ddof, "variance_floor": variance_floor, "eps": eps}
    z_B_K = tables.z_score_per_turn(tables.reward_B_K, **norm)
    zeros_B = torch.zeros_like(tables.outcome_B)
    sum_B_K = tables.backward(zeros_B, lambda k, next_B: z_B_K[:, k] + gamma * next_B)
    n_B_K = tables.backward(zeros_B, lambda k, next_B: next_B + 1)
    outcome_B = outcome_scale * tables.outcome_advantage(outcome_operator, **norm)
    advantage_B_K = alpha * gain_scale * sum_B_K / n_B_K.clamp(min=1).sqrt() + outcome_B[:, None]
    scale_B_K = adaptive_clip_scale(z_B_K, clip_beta)
    clip_scale_B_K = tables.backward(torch.ones_like(zeros_B), lambda k, _: scale_B_K[:, k])
    return advantage_B_K, outcome_B, clip_scale_B_K


def adaptive_clip_scale(z: torch.Tensor, beta: float) -> torch.Tensor:
    """c = 1 + beta (2 sigmoid(z) - 1), in (1 - beta, 1 + beta): a wider range for a turn that gained more."""
    return 1 + beta * (2 * z.sigmoid() - 1)


MODE = TurnMode(
    name="turn-group-v1d",
    function=turn_group_v1d,
    reduces_to="none, when there are no gains or alpha is 0",
    bias="as turn-group",
    departures="turns come from turn ids, not from rewards that differ from 0; groups of one give 0",
    source="2605.06200",
    properties=CENTRED | NORMALISED,
    per_turn=True,
)
