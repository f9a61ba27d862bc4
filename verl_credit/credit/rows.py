"""Statistics over each row's own tokens, in float64."""

import torch


def row_mean(values_B_T: torch.Tensor, member_B_T: torch.Tensor) -> torch.Tensor:
    """Mean over the members of a row, float64 [B, 1]; 0 for a row without any. Non-members may be anything."""
    values_B_T = torch.where(member_B_T, values_B_T.to(torch.float64), 0.0)
    return values_B_T.sum(dim=1, keepdim=True) / member_B_T.sum(dim=1, keepdim=True).clamp(min=1)
