"""`algorithm.turn_values=critic`: the value of the state before every turn by verl's critic, and what that learns from it.

verl's critic has a value for each token of the response: its output at the token before, which has read no more than the
state that the token is written in. The state before a turn is that of its first token. verl computes the values before
advantages, by weights that no outcome of the step has changed, and trains the critic on ``returns`` after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_credit.credit import spread
from verl_credit.lazy import torch

if TYPE_CHECKING:
    from verl_credit.turns.assign import StepInputs

VALUES = "values"
"""verl's field of the values, [B, T]."""


def turns_of_critic(inputs: StepInputs, turn_B_K1: torch.Tensor) -> torch.Tensor:
    """value_B_K1 of the turns that ``turn_B_K1`` names, 0 elsewhere."""
    if inputs.value_B_T is None:
        raise ValueError("algorithm.turn_values=critic needs verl's critic, which this trainer does not have")
    is_turn_B_K1_T = inputs.turns.turn_ids_B_T[:, None] == torch.arange(turn_B_K1.shape[1])[:, None]
    value_B_K1 = inputs.value_B_T.to(torch.float64).gather(1, is_turn_B_K1_T.byte().argmax(dim=2))
    return torch.where(turn_B_K1, value_B_K1, 0.0)


def learned_by_critic(
    inputs: StepInputs, return_B_K1: torch.Tensor, mask_B_T: torch.Tensor
) -> torch.Tensor | None:
    """return_B_T: all tokens of turn k have its return G_k, as after the whole turn; None where there is no critic.

    A token without a known return (a lost turn reward, a row that is not valid) has the critic's own value: no error.
    """
    if inputs.value_B_T is None:
        return None
    return_B_T = spread(return_B_K1, inputs.turns.turn_ids_B_T, mask_B_T, fill=torch.nan)
    return torch.where(return_B_T.isfinite(), return_B_T, inputs.value_B_T.to(return_B_T.dtype))
