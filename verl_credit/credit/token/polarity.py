"""Common parts of GTPO's and GRPO-S's reward shaping: polarities, clipped entropies, groups without a signal."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_credit.credit.checks import as_bool, as_group_ids, check_shape, first_row
from verl_credit.credit.chunks import row_chunks
from verl_credit.credit.outcome.outcome import valid_rows

SOLVED_ABOVE = 0.5
EPS = 1e-8  # added to entropies, so that equal ones keep exactly equal shares


@dataclass(frozen=True)
class Polarity:
    """Checked inputs, float64. Not in use: rows that do not count or have no token, groups of one polarity."""

    entropy_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    rewarded_B: torch.Tensor
    group_B: torch.Tensor
    in_use_B: torch.Tensor

    @property
    def side_B(self) -> torch.Tensor:
        """One number per prompt and polarity."""
        return self.group_B * 2 + self.rewarded_B.long()


def polarity(
    outcome_B: torch.Tensor,
    entropy_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    group_B: torch.Tensor,
    *,
    entropy_clip: tuple[float, float] | None,
    row_valid_B: torch.Tensor | None,
) -> Polarity:
    valid_B = valid_rows(outcome_B, group_B, row_valid_B)
    check_shape("mask_B_T", mask_B_T, entropy_B_T.shape, "entropy_B_T")
    check_shape("entropy_B_T", entropy_B_T, (*outcome_B.shape, *entropy_B_T.shape[1:]), "outcome_B has rows")
    mask_B_T = as_bool("mask_B_T", mask_B_T) & valid_B[:, None]
    valid_B = mask_B_T.any(dim=1)
    bad_B = valid_B & ~outcome_B.isfinite()
    if bad_B.any():
        raise ValueError(f"outcome_B row {first_row(bad_B)} is not finite; expected finite outcomes")
    value_B_T = torch.empty(mask_B_T.shape, dtype=torch.float64, device=entropy_B_T.device)
    for rows in row_chunks(mask_B_T):
        value_C_T = torch.where(mask_B_T[rows], entropy_B_T[rows].detach().to(torch.float64), 0.0)
        bad_C_T = ~((value_C_T >= -1e-4) & (value_C_T < torch.inf))
        if bad_C_T.any():
            raise ValueError(
                f"entropy_B_T row {rows.start + first_row(bad_C_T)} holds a value that is not an entropy; "
                "expected finite numbers >= 0"
            )
        value_C_T.clamp_(min=0)
        if entropy_clip is not None:
            value_C_T = torch.where(mask_B_T[rows], value_C_T.clamp_(*entropy_clip), 0.0)
        value_B_T[rows] = value_C_T
    group_B = as_group_ids("group_B", group_B)
    rewarded_B = (outcome_B > SOLVED_ABOVE) & valid_B
    n_groups = outcome_B.numel()
    zeros_G = torch.zeros(n_groups, dtype=torch.long, device=group_B.device)
    members_G = zeros_G.index_add(0, group_B, valid_B.long())
    rewarded_G = zeros_G.index_add(0, group_B, rewarded_B.long())
    mixed_G = (rewarded_G > 0) & (rewarded_G < members_G)
    return Polarity(value_B_T, mask_B_T, rewarded_B, group_B, valid_B & mixed_G[group_B])


def shares(entropy_N: torch.Tensor, rewarded_N: torch.Tensor) -> torch.Tensor:
    """A rewarded trajectory's entropy, another one's inverse entropy; never 0."""
    return torch.where(rewarded_N, entropy_N + EPS, 1 / (entropy_N + EPS))
