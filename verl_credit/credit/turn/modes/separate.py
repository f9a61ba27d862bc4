"""separate: a prompt's outcomes and its gains have each their own mean and std (IGPO)."""

from collections.abc import Callable

import torch

from verl_credit.credit.groups import EPS, VARIANCE_FLOOR
from verl_credit.credit.operator import CENTRED, NORMALISED, AtLeastZero, Count, Positive, Share
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


def separate(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    gain_scale: AtLeastZero = 1.0,
    outcome_scale: AtLeastZero = 1.0,
    outcome_operator: str | Callable[..., torch.Tensor] = "grpo",
    norm_by_std: bool = True,
    ddof: Count = 0,
    variance_floor: AtLeastZero = VARIANCE_FLOOR,
    eps: Positive = EPS,
) -> ModeOutput:
    """Compares gains with all gains of the prompt, and adds them up from the answer back.

        A_k = z(gain_k) + gamma A_(k+1), z over the gains of all turns of the prompt
        A_answer = R

    A turn without a gain reads the advantage of the row's next gain.
    """
    norm = {"norm_by_std": norm_by_std, "ddof": ddof, "variance_floor": variance_floor, "eps": eps}
    z_B_K = gain_scale * tables.z_score_over_turns(**norm)
    outcome_B = outcome_scale * tables.outcome_advantage(outcome_operator, **norm)
    advantage_B_K = tables.backward(outcome_B, lambda k, next_B: z_B_K[:, k] + gamma * next_B)
    return advantage_B_K, outcome_B, tables.ones()


MODE = TurnMode(
    name="separate",
    function=separate,
    reduces_to="none, when there are no gains",
    bias="all turns share one mean; where outcomes tie, R is 0 and the gains' order acts alone, at full size",
    departures="turns come from turn ids, not from rewards that differ from 0; equal values and groups of one give 0",
    source="2510.14967",
    properties=CENTRED | NORMALISED,
)
