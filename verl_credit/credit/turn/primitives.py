"""The method's three parts as objects, for loops that are not verl's."""

from dataclasses import dataclass

import torch

from verl_credit.credit.checks import as_bool, as_group_ids, check_shape, output_dtype
from verl_credit.credit.groups import EPS, VARIANCE_FLOOR, z_score_per_turn
from verl_credit.credit.turn.adaptive_clip import adaptive_clip_scale
from verl_credit.credit.turn.info_gain import InfoGain, info_gain


@dataclass(frozen=True)
class InformationGain:
    """Scores of the gold answer per context -> gains per tool turn; see `info_gain`."""

    info_gain_type: str = "prob_diff"
    first_turn: str = "prior"

    def __call__(self, score_B_K1: torch.Tensor, context_mask_B_K1: torch.Tensor) -> InfoGain:
        return info_gain(
            score_B_K1, context_mask_B_K1, info_gain_type=self.info_gain_type, first_turn=self.first_turn
        )


@dataclass(frozen=True)
class TurnGroupNormalizer:
    """Gains -> z-scores against the same tool turn of the same prompt's other trajectories.

    Exactly 0 where a turn has no gain or lost it (NaN), where all gains of its group are equal, and in groups of one.
    """

    norm_by_std: bool = True
    ddof: int = 0
    variance_floor: float = VARIANCE_FLOOR
    eps: float = EPS

    def __call__(
        self, info_gain_B_K: torch.Tensor, turn_mask_B_K: torch.Tensor, group_B: torch.Tensor
    ) -> torch.Tensor:
        check_shape("turn_mask_B_K", turn_mask_B_K, info_gain_B_K.shape, "info_gain_B_K")
        check_shape("group_B", group_B, info_gain_B_K.shape[:1], "info_gain_B_K has rows")
        z_B_K = z_score_per_turn(
            info_gain_B_K,
            as_bool("turn_mask_B_K", turn_mask_B_K) & info_gain_B_K.isfinite(),
            as_group_ids("group_B", group_B),
            norm_by_std=self.norm_by_std,
            ddof=self.ddof,
            variance_floor=self.variance_floor,
            eps=self.eps,
        )
        return z_B_K.to(output_dtype(info_gain_B_K))


@dataclass(frozen=True)
class AdaptiveTurnClipper:
    """z-scores of gains -> factors on the clip range: 1 + beta (2 sigmoid(z) - 1)."""

    beta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}; expected a number at least 0 and below 1")

    def __call__(self, z_B_K: torch.Tensor) -> torch.Tensor:
        return adaptive_clip_scale(z_B_K, self.beta)
