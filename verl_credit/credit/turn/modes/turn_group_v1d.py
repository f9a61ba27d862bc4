"""turn-group-v1d: gains compared per prompt and turn, their discounted sum rescaled by its length (A2TGPO)."""

import torch

from verl_credit.credit.operator import CENTRED, NORMALISED
from verl_credit.credit.turn.adaptive_clip import adaptive_clip_scale
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


def turn_group_v1d(tables: Tables) -> ModeOutput:
    """z_k = z(gain_k),  D_k = sum_{j >= k} gamma^(j-k) z_j over the n_k gains from k on

    A_k = alpha D_k / sqrt(n_k) + R,   A_answer = R,   clip scale_k = 1 + clip_beta (2 sigmoid(z_k) - 1)
    """
    z_B_K = tables.z_score_per_turn(tables.gain_B_K)
    zeros_B = torch.zeros_like(tables.outcome_B)
    sum_B_K = tables.backward(zeros_B, lambda k, next_B: z_B_K[:, k] + tables.gamma * next_B)
    n_B_K = tables.backward(zeros_B, lambda k, next_B: next_B + 1)
    outcome_B = tables.outcome_advantage()
    weight = tables.alpha * tables.gain_scale
    advantage_B_K = weight * sum_B_K / n_B_K.clamp(min=1).sqrt() + outcome_B[:, None]
    scale_B_K = adaptive_clip_scale(z_B_K, tables.clip_beta)
    clip_scale_B_K = tables.backward(torch.ones_like(zeros_B), lambda k, _: scale_B_K[:, k])
    return advantage_B_K, outcome_B, clip_scale_B_K


MODE = TurnMode(
    name="turn-group-v1d",
    function=turn_group_v1d,
    equation=(
        "D_k = sum over j >= k of gamma^(j-k) z(gain_j per prompt and turn), n_k terms; "
        "A_k = alpha D_k / sqrt(n_k) + R; clip scale 1 + beta (2 sigmoid(z_k) - 1)"
    ),
    reduces_to="none, when there are no gains or alpha is 0",
    bias="as turn-group",
    departures="turns come from turn ids, not from rewards that differ from 0; groups of one give 0",
    source="2605.06200",
    properties=CENTRED | NORMALISED,
    scales_clip=True,
    reads_alpha=True,
)
