"""Importance ratios shared by the tokens of a turn or of a trajectory."""

import torch

RATIO_LEVELS = ("token", "turn", "sequence")
TOKEN_LOG_RATIO_LIMIT = 20.0  # verl's vanilla loss clamps the token log-ratio to +-20
SEGMENT_LOG_RATIO_LIMIT = 10.0  # the released turn loss (and GSPO) caps the log-ratio at 10 from above


def importance_ratio(
    delta_B_T: torch.Tensor, mask_B_T: torch.Tensor, turn_ids_B_T: torch.Tensor, ratio_level: str
) -> torch.Tensor:
    """exp of the log-ratio `delta` at the given level; 1 where the mask is False.

        token:     exp(delta_t)
        turn:      exp(mean of delta over the policy tokens of t's turn)
        sequence:  exp(mean of delta over the row's policy tokens)

    A shared ratio takes its value from the mean and its gradient from each token's own log-probability
    (d ratio / d delta_t = ratio), as GSPO does.
    """
    if ratio_level == "token":
        return delta_B_T.clamp(-TOKEN_LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT).exp()
    ids_B_T = turn_ids_B_T if ratio_level == "turn" else torch.zeros_like(turn_ids_B_T)
    shared_B_T = segment_mean(delta_B_T.detach(), mask_B_T, ids_B_T)
    own_B_T = delta_B_T - delta_B_T.detach()  # zero, but it carries the gradient
    return (own_B_T + shared_B_T).clamp(max=SEGMENT_LOG_RATIO_LIMIT).exp()


def segment_mean(values_B_T: torch.Tensor, mask_B_T: torch.Tensor, ids_B_T: torch.Tensor) -> torch.Tensor:
    """Mean over the policy tokens that share a row and an id, at each of those tokens; 0 where mask is False.

    A row of T tokens has at most T turns, so a T-wide table holds the sums without reading the ids.
    """
    ids_B_T = torch.where(mask_B_T, ids_B_T, 0).long()
    values_B_T = torch.where(mask_B_T, values_B_T, 0.0)
    sums_B_T = torch.zeros_like(values_B_T).scatter_add_(1, ids_B_T, values_B_T)
    tokens_B_T = torch.zeros_like(values_B_T).scatter_add_(1, ids_B_T, mask_B_T.to(values_B_T.dtype))
    return torch.where(mask_B_T, (sums_B_T / tokens_B_T.clamp(min=1)).gather(1, ids_B_T), 0.0)
